"""A value that is measured once for a model: what all kinds have in common, and where they are stored.

    user's cache     KIND/MODEL.json      measured by this user (`smoe tune`); takes precedence
    model's folder   FILE_NAME            delivered with the model, for some kinds

A file is a JSON object with the version of its kind as "format". A file of another version, or one that is damaged, is
no value. Values with tensors are stored by `learned_file.py`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from smoe.user_cache import keep, of_model, read_stored

V = TypeVar("V", bound="TunedValue")


class TunedValue:
    """One kind of value; its subclasses are frozen dataclasses."""

    kind: ClassVar[str]
    """The folder of its files in the user's cache."""
    version: ClassVar[int] = 1
    file_name: ClassVar[str] = ""
    """The file's name in a model's folder; empty if models do not deliver such values."""

    @classmethod
    def of_fields(cls: type[V], fields: dict[str, Any]) -> V:
        """Return the value of a stored object. Raises `KeyError`, `TypeError` or `ValueError` if it is none."""
        return cls(**fields)

    def fields(self) -> dict[str, Any]:
        """Return the object to store."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]  # its subclasses are dataclasses

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {"format": self.version} | self.fields()

    def store(self, folder: Path) -> Path:
        """Store the value for the model in `folder` in the user's cache, atomically; return the path. Raises
        `OSError`."""
        return keep(of_model(self.kind, folder), self.as_json())

    @classmethod
    def measured(cls: type[V], folder: Path) -> V | None:
        """Return the user's value for the model in `folder`."""
        return cls._read(of_model(cls.kind, folder))

    @classmethod
    def delivered(cls: type[V], folder: Path) -> V | None:
        """Return the value that the model in `folder` delivers."""
        return cls._read(folder / cls.file_name)

    @classmethod
    def _read(cls: type[V], path: Path) -> V | None:
        fields = read_stored(path, cls.version)
        try:
            return None if fields is None else cls.of_fields(fields)
        except (KeyError, TypeError, ValueError):
            return None
