"""The user's cache folder, which stores measurements for later commands: machine profiles, quality costs and tuned
values.

The folder is optional. If it cannot be written, measurements are shown but not stored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from smoe.whole_file import whole_file

V = TypeVar("V", bound="StoredValue")

PLACE = "XDG_CACHE_HOME"
"""The environment variable whose value replaces the cache folder's usual location, on every system."""

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the folder `smoe` in the user's or the system's folder for caches; it may not exist yet."""
    if os.environ.get(PLACE):
        base = Path(os.environ[PLACE])
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", str(Path.home() / "AppData" / "Local")))
    else:
        base = Path.home() / ".cache"
    return base / "smoe"


def check_writable() -> None:
    """Raise `OSError` if no file can be stored in the cache folder. It is called before minutes are spent on
    measurements."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def of_model(kind: str, folder: Path) -> Path:
    """Return the path of the file that stores data of one `kind`, such as tuned values, about the model in `folder`."""
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return cache_folder() / kind / f"{key}.json"


def read_stored(path: Path, form: int) -> dict[str, Any] | None:
    """Return the JSON object stored in a file, without its key "format". Return None if the file is missing or if
    "format" is not `form`."""
    try:
        stored = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError):
        return None
    return stored if isinstance(stored, dict) and stored.pop("format", None) == form else None


def keep(path: Path, content: dict[str, Any]) -> Path:
    """Write a JSON object to a file of the cache folder, completely or not at all. Return the path. Raise `OSError` on
    failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
    _log.info("stored %s", path)
    return path


class StoredValue:
    """The base class of values that are stored in the cache folder as JSON objects. Subclasses are frozen dataclasses.

    The entry "format" of a file is the version of its class. A file of another version, or a damaged one, is ignored.
    """

    kind: ClassVar[str]
    """The folder in the cache folder that has the files of this class."""
    version: ClassVar[int] = 1

    @classmethod
    def of_fields(cls: type[V], fields: dict[str, Any]) -> V:
        """Return the value that a JSON object contains. Raise `KeyError`, `TypeError` or `ValueError` if the object is
        invalid."""
        return cls(**fields)

    def fields(self) -> dict[str, Any]:
        """Return the value as a JSON object to store, without the format version."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]  # its subclasses are dataclasses

    @classmethod
    def path_of(cls, place: Any) -> Path:
        """Return the path of the file about the model, or the file, at `place`."""
        return of_model(cls.kind, place)

    def store(self, place: Any) -> Path:
        """Store the value for `place`, atomically. Return the file's path. Raises `OSError`."""
        return keep(self.path_of(place), {"format": self.version} | self.fields())

    @classmethod
    def stored(cls: type[V], place: Any) -> V | None:
        """Return the value that is stored for `place`, or None."""
        return cls.read(cls.path_of(place))

    @classmethod
    def read(cls: type[V], path: Path) -> V | None:
        """Return the value in a file, or None."""
        fields = read_stored(path, cls.version)
        try:
            return None if fields is None else cls.of_fields(fields)
        except (KeyError, TypeError, ValueError):
            return None
