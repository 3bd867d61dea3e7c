"""Tuned values, which are measured once for a model: what all kinds of them have in common, and where they are stored.

    user's cache      KIND/MODEL.json    measured by this user (`smoe tune`); takes precedence
    model's folder    FILE_NAME          delivered with the model, for some kinds

A file is a JSON object whose entry "format" is the version of its kind. A file of another version, or a damaged one, is
ignored. Values that contain tensors are stored by `learned_file.py`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from smoe.user_cache import keep, of_model, read_stored

V = TypeVar("V", bound="TunedValue")


class TunedValue:
    """The base class of all kinds of tuned values. Subclasses are frozen dataclasses."""

    kind: ClassVar[str]
    """The folder in the user's cache that has the files of this kind."""
    version: ClassVar[int] = 1
    file_name: ClassVar[str] = ""
    """The name of the file in a model's folder; empty if models deliver no values of this kind."""

    @classmethod
    def of_fields(cls: type[V], fields: dict[str, Any]) -> V:
        """Return the tuned value that a JSON object contains. Raise `KeyError`, `TypeError` or `ValueError` if the
        object is invalid."""
        return cls(**fields)

    def fields(self) -> dict[str, Any]:
        """Return the tuned value as a JSON object to store, without the format version."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]  # its subclasses are dataclasses

    def as_json(self) -> dict[str, Any]:
        """Return the tuned value as a JSON object for programs."""
        return {"format": self.version} | self.fields()

    @classmethod
    def path_of(cls, place: Any) -> Path:
        """Return the path of the file in the user's cache for the model in the folder `place`."""
        return of_model(cls.kind, place)

    def store(self, place: Any) -> Path:
        """Store the tuned value for the model in the folder `place` in the user's cache, atomically. Return the file's
        path. Raises `OSError`."""
        return keep(self.path_of(place), {"format": self.version} | self.fields())

    @classmethod
    def measured(cls: type[V], place: Any) -> V | None:
        """Return the tuned value that this user has measured for the model in the folder `place`, or None."""
        return cls._read(cls.path_of(place))

    @classmethod
    def delivered(cls: type[V], folder: Path) -> V | None:
        """Return the tuned value that is delivered with the model, as a file in `folder`, or None."""
        return cls._read(folder / cls.file_name)

    @classmethod
    def _read(cls: type[V], path: Path) -> V | None:
        fields = read_stored(path, cls.version)
        try:
            return None if fields is None else cls.of_fields(fields)
        except (KeyError, TypeError, ValueError):
            return None
