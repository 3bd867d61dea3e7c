"""A cache of compiled kernels in the user's cache folder, so that later processes need not compile them.

    an entry    | magic | SHA-256 of its key and content | content |

The key names everything on which the content depends, so an entry never becomes outdated. Because the content is
executed, an entry is used only under three conditions: the file and its folder belong to this user, no other user can
write them, and the digest matches. Other entries are ignored and replaced by the next write. Only on Linux
(`machine_code.py`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import stat
from collections.abc import Callable
from pathlib import Path

from smoe import __version__, formats, kernels
from smoe.user_cache import cache_folder
from smoe.whole_file import whole_file

MOST_BYTES = 16 << 20
"""The largest size of all entries together, in bytes. The kernels of one format take some 30 KB."""
_MAGIC = b"smoe code 1\n"
_DIGEST_BYTES = 32
_CPUINFO = Path("/proc/cpuinfo")
_OF_A_PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features",
                   "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")  # fmt: skip
"""The lines of /proc/cpuinfo that describe the processor and do not change while the system runs."""

_log = logging.getLogger(__name__)


def folder() -> Path:
    """Return the path of the folder with the entries, which may not exist."""
    return cache_folder() / "kernels"


def key_of(*parts: str) -> bytes:
    """Return the cache key of a compiled kernel. The key contains `parts`, a description of this processor, and a
    digest of the code that generates kernels."""
    return "\0".join([__version__, source_digest(), _processor(), *parts]).encode()


def read(key: bytes) -> bytes | None:
    """Return the stored machine code for a key and mark its entry as recently used. Return None if there is no entry
    that passes the checks of ownership and digest."""
    path = _path_of(key)
    try:
        if not _is_ours_alone(path.parent.stat(), stat.S_ISDIR):
            return None
        with open(path, "rb", opener=_opened_itself) as file:
            if not _is_ours_alone(os.fstat(file.fileno()), stat.S_ISREG):
                return None
            entry = file.read(MOST_BYTES)
        begin = len(_MAGIC) + _DIGEST_BYTES
        content = entry[begin:]
        if entry[:begin] != _MAGIC + _digest(key, content):
            return None
        os.utime(path)
    except OSError:
        return None
    return content


def write(key: bytes, content: bytes) -> None:
    """Store machine code under a key, and delete the least recently used entries if all entries exceed `MOST_BYTES`. If
    writing fails, only log a message."""
    path = _path_of(key)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours_alone(path.parent.stat(), stat.S_ISDIR):
            _log.info(
                "compiled kernels are not stored, because the folder %s belongs to another user, or other users can "
                "write to it",
                path.parent,
            )
            return
        with whole_file(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(_MAGIC + _digest(key, content) + content)
        _drop_oldest(path.parent)
    except OSError as error:
        _log.info("compiled kernels are not stored: %s", error)


@functools.cache
def source_digest() -> str:
    """Return a digest of the source code of all modules that generate kernels, and of the formats."""
    found = hashlib.sha256()
    for package in (kernels, formats):
        for path in sorted(Path(next(iter(package.__path__))).glob("*.py")):
            found.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


@functools.cache
def _processor() -> str:
    """Return a description of the CPU: two CPUs with different machine code have different descriptions. Without
    /proc/cpuinfo it is the system's name of the machine type."""
    with contextlib.suppress(OSError), _CPUINFO.open(encoding="utf8", errors="replace") as file:
        lines = []
        for line in file:
            if not line.strip():
                break  # the following processors equal the first
            if line.partition(":")[0].strip() in _OF_A_PROCESSOR:
                lines.append(" ".join(line.split()))
        return "\n".join([platform.machine(), *lines])
    return platform.machine()


def _path_of(key: bytes) -> Path:
    return folder() / f"{hashlib.sha256(key).hexdigest()[:40]}.code"


def _digest(key: bytes, content: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(key).digest() + content).digest()


def _opened_itself(path: str, flags: int) -> int:
    """Open a file without following symbolic links, and without blocking on a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _is_ours_alone(found: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a file has the wanted type (`is_kind`), belongs to this user, and is not writable by others."""
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _drop_oldest(where: Path) -> None:
    with os.scandir(where) as entries:
        files = [(found.st_mtime_ns, found.st_size, each.path) for each in entries if (found := each.stat())]
    room = MOST_BYTES
    for _, size, path in sorted(files, reverse=True):
        room -= size
        if room < 0:
            Path(path).unlink(missing_ok=True)
