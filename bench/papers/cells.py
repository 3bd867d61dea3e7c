"""Finished cells of a paper's sweep, in the user's cache: an interrupted simulation goes on from them.

A cell is a file, whole or not there, named by a checksum of its setting. It lies in a folder named by the paper and by
everything else that decides: the code and the profiles of this smoe, its version, Python's and NumPy's. Cells of
another version are dropped when the first one is stored, if none was written for a week.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import shutil
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

import smoe
from bench.papers.claims import Cell, Setting
from smoe.user_cache import cache_folder, keep, read_stored

_HERE = Path(__file__).parent
_FORMAT = 1
_OLD_SECONDS = 7 * 24 * 3600.0


class Cells:
    """Of one paper's sweep."""

    def __init__(self, paper: str, *, is_fresh: bool = False) -> None:
        """`is_fresh`: those that are there are not asked, but written again."""
        self._paper, self._is_fresh = paper, is_fresh
        self._folder = cache_folder() / "simulated" / f"{paper}-{_decided_by()}"

    def find(self, setting: object) -> Cell | None:
        """What this smoe has simulated of a setting."""
        stored = None if self._is_fresh else read_stored(self._path(setting), _FORMAT)
        try:
            if stored is None:
                return None
            return Cell([Setting(**each) for each in stored["settings"]], dict(stored["figures"]))
        except (KeyError, TypeError, ValueError):
            return None  # of no form that this version writes

    def keep(self, setting: object, cell: Cell) -> None:
        """Whole or not at all; where the folder cannot be written, nothing is stored."""
        with suppress(OSError):
            if not self._folder.exists():
                for other in self._folder.parent.glob(f"{self._paper}-*"):
                    if time.time() - other.stat().st_mtime > _OLD_SECONDS:
                        shutil.rmtree(other, ignore_errors=True)
            keep(self._path(setting), {"format": _FORMAT} | asdict(cell))

    def _path(self, setting: object) -> Path:
        return self._folder / f"{hashlib.sha256(repr(setting).encode()).hexdigest()[:16]}.json"


@functools.cache
def _decided_by() -> str:
    """A checksum of what decides in addition to the setting."""
    versions = (smoe.__version__, platform.python_version(), platform.machine(), np.__version__)
    digest, package = hashlib.sha256(repr(versions).encode()), Path(smoe.__file__).parent
    profiles = package / "profiles"
    for folder, files in (
        (_HERE, _HERE.glob("*.py")),
        (package, package.rglob("*.py")),
        (profiles, profiles.glob("*.json")),
    ):
        for path in sorted(files):
            digest.update(f"{folder.name} {path.relative_to(folder)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
