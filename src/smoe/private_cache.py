"""Entries in the user's cache folder that are used only if no other user can have written them.

    an entry    | magic | SHA-256 of its key and content | content |

The key names everything on which the content depends, so an entry never becomes outdated. An entry is used only under
three conditions: the file and its folder belong to this user, no other user can write them, and the digest matches.
Other entries are ignored and replaced by the next write. Only for systems with user ids (`is_possible`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from smoe.user_cache import cache_folder
from smoe.whole_file import whole_file

_DIGEST_BYTES = 32
_log = logging.getLogger(__name__)


def is_possible() -> bool:
    """Return whether this system tells which user owns a file, so that entries can be checked."""
    return hasattr(os, "geteuid") and hasattr(os, "O_NOFOLLOW")


class PrivateCache(NamedTuple):
    """The entries of one kind, in a folder of their own."""

    name: str
    """The name of the folder within the user's cache folder."""
    what: str
    """A noun in the plural for the entries, for messages."""
    suffix: str
    """The last part of the entries' file names."""
    magic: bytes
    """The first bytes of every entry: its kind and the version of its form."""
    most_bytes: int
    """The largest size of all entries together, in bytes."""

    @property
    def folder(self) -> Path:
        """The path of the folder with the entries, which may not exist."""
        return cache_folder() / self.name

    def path_of(self, key: bytes) -> Path:
        """Return the path of the entry for a key."""
        return self.folder / f"{hashlib.sha256(key).hexdigest()[:40]}.{self.suffix}"

    def read(self, key: bytes) -> bytes | None:
        """Return the content that is stored for a key, and mark its entry as recently used. Return None if there is no
        entry that passes the checks of ownership and digest."""
        path = self.path_of(key)
        try:
            if not _is_ours_alone(path.parent.stat(), stat.S_ISDIR):
                return None
            with open(path, "rb", opener=_opened_itself) as file:
                if not _is_ours_alone(os.fstat(file.fileno()), stat.S_ISREG):
                    return None
                entry = file.read(self.most_bytes)
            begin = len(self.magic) + _DIGEST_BYTES
            content = entry[begin:]
            if entry[:begin] != self.magic + _digest(key, content):
                return None
            os.utime(path)
        except OSError:
            return None
        return content

    def write(self, key: bytes, content: bytes) -> None:
        """Store a content under a key, and delete the least recently used entries if all entries exceed `most_bytes`.
        If writing fails, only log a message."""
        path = self.path_of(key)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours_alone(path.parent.stat(), stat.S_ISDIR):
                _log.info(
                    "%s are not stored, because the folder %s belongs to another user, or other users can write to it",
                    self.what,
                    path.parent,
                )
                return
            with whole_file(path) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(self.magic + _digest(key, content) + content)
            self._drop_oldest()
        except OSError as error:
            _log.info("%s are not stored: %s", self.what, error)

    def forget(self, key: bytes) -> None:
        """Delete the entry for a key, if there is one. Raise `OSError` on failure."""
        self.path_of(key).unlink(missing_ok=True)

    def _drop_oldest(self) -> None:
        files: list[tuple[int, int, str]] = []
        with os.scandir(self.folder) as entries:
            for each in entries:
                with contextlib.suppress(FileNotFoundError):  # another thread has completed or deleted it
                    files.append(((found := each.stat()).st_mtime_ns, found.st_size, each.path))
        room = self.most_bytes
        for _, size, path in sorted(files, reverse=True):
            room -= size
            if room < 0:
                Path(path).unlink(missing_ok=True)


def _digest(key: bytes, content: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(key).digest() + content).digest()


def _opened_itself(path: str, flags: int) -> int:
    """Open a file without following symbolic links, and without blocking on a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _is_ours_alone(found: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a file has the wanted type (`is_kind`), belongs to this user, and is not writable by others."""
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
