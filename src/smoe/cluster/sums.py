"""Checksums of a model's files, computed once and stored in the user's cache while the file is unchanged.

A file is identified by its path, inode, size and modification time. The checksums are not stored in the model's folder,
which may not be writable.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from smoe.cluster.files import CHUNK_BYTES, SentFile
from smoe.memory.expert_files import FileIdentity, check_identity, identity_of
from smoe.user_cache import keep, of_model, read_stored

_FORMAT = 1
_READ_BYTES = 1 << 20
"""Bytes read at a time; other work can proceed between two reads."""

_log = logging.getLogger(__name__)


def sums_of(path: Path, name: str, before: Callable[[int], None]) -> SentFile:
    """Return the checksums of a file, from the cache or computed now; `name`: its transfer name. `before(nbytes)` is
    called before each read of `nbytes` bytes.

    Raises `OSError`. Raises `CheckpointError` if the file changes while it is read.
    """
    return stored_sums(path, name) or keep_sums(path, make_sums(path, name, before))


def make_sums(path: Path, name: str, before: Callable[[int], None]) -> SentFile:
    """Read the whole file and compute its checksums. Raises the same errors as `sums_of`."""
    whole, sums, done = hashlib.sha256(), bytearray(), 0
    with path.open("rb", buffering=0) as file:
        identity = identity_of(file.fileno())
        while done < identity.nbytes:
            chunk, end = hashlib.sha256(), min(done + CHUNK_BYTES, identity.nbytes)
            while done < end:
                wanted = min(_READ_BYTES, end - done)
                before(wanted)
                data = file.read(wanted)
                if not data:
                    break
                chunk.update(data)
                whole.update(data)
                done += len(data)
            sums += chunk.digest()
            check_identity(path, file.fileno(), identity)
    return SentFile(name, identity.nbytes, whole.hexdigest(), bytes(sums))


def stored_sums(path: Path, name: str) -> SentFile | None:
    """Return the stored checksums of a file that has not changed since; None if there are none."""
    stored = read_stored(of_model("sums", path), _FORMAT)
    if stored is None or stored.get("identity") != _identity(path):
        return None
    try:
        return SentFile(name, int(stored["identity"][1]), str(stored["sha256"]), bytes.fromhex(stored["chunks"]))
    except (KeyError, TypeError, ValueError):
        return None


def keep_sums(path: Path, made: SentFile) -> SentFile:
    """Store the checksums in the user's cache, if the cache can be written. Return the checksums."""
    content = {"format": _FORMAT, "identity": _identity(path), "sha256": made.digest, "chunks": made.sums.hex()}
    try:
        keep(of_model("sums", path), content)
    except OSError as error:
        _log.warning("checksums of %s cannot be stored, so the next run computes them again: %s", path, error)
    return made


def forget_sums(path: Path) -> None:
    """Delete the stored checksums of a file, because they are wrong."""
    with suppress(OSError):
        of_model("sums", path).unlink(missing_ok=True)


def identity(path: Path) -> FileIdentity:
    """Return the identity of a file: its device, inode, size and modification time. Raises `OSError`."""
    with path.open("rb", buffering=0) as file:
        return identity_of(file.fileno())


def _identity(path: Path) -> list[int]:
    """Return the identity of a file without the device's number, which may change when the system restarts."""
    return list(identity(path)[1:])
