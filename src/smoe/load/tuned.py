"""Tuned values, which are measured once for a model: what all kinds of them have in common, and where they are stored.

    user's cache      KIND/MODEL.json    measured by this user (`smoe tune`); takes precedence
    model's folder    FILE_NAME          delivered with the model, for some kinds

Values that contain tensors are stored by `learned_file.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypeVar

from smoe.config import EngineConfig
from smoe.user_cache import StoredValue

V = TypeVar("V", bound="TunedValue")


class TunedValue(StoredValue):
    """The base class of all kinds of tuned values."""

    file_name: ClassVar[str] = ""
    """The name of the file in a model's folder; empty if models deliver no values of this kind."""

    @classmethod
    def apply(cls, config: EngineConfig, folder: Path, resident_share: float) -> tuple[EngineConfig, dict[str, str]]:
        """Return the settings for the model in `folder`, with the tuned value in place of a setting that the user left
        out, and {setting: origin of its value}. `resident_share`: the fraction of experts that fit into memory."""
        del folder, resident_share
        return config, {}

    def as_json(self) -> dict[str, Any]:
        """Return the tuned value as a JSON object for programs."""
        return {"format": self.version} | self.fields()

    @classmethod
    def delivered(cls: type[V], folder: Path) -> V | None:
        """Return the tuned value that is delivered with the model, as a file in `folder`, or None."""
        return cls.read(folder / cls.file_name)
