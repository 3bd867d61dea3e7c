"""One process at a time, by either system's lock.

Would catch a lock that two have, one that outlives its holder, and files that locks leave behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smoe import file_lock
from smoe.file_lock import FileLock


class CLibrary:
    """`msvcrt`, as far as it locks: a byte of a file, which goes with the descriptor."""

    LK_NBLCK = 2

    def locking(self, descriptor: int, mode: int, nbytes: int) -> None:
        assert mode == self.LK_NBLCK and nbytes == 1
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None


@pytest.fixture(params=["linux", "win32"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(file_lock, "sys", SimpleNamespace(platform=request.param))
    monkeypatch.setitem(sys.modules, "msvcrt", CLibrary())  # type: ignore[arg-type]
    return str(request.param)


@pytest.mark.parametrize("is_folder", [True, False])
def test_one_has_it(platform: str, is_folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "it"
    if is_folder:
        path.mkdir()
    with FileLock(path) as first:
        for _ in range(2):  # who is refused takes nothing from who has it
            with pytest.raises(BlockingIOError):
                FileLock(path)
        if not is_folder:
            path.write_bytes(b"what is locked can be written")
            assert path.read_bytes() == b"what is locked can be written"
    first.close()
    FileLock(path).close()
    left = [each.name for each in tmp_path.rglob("*")]
    assert left == (["it"] if is_folder or path.exists() else []), "nothing but the file itself"


def test_whoever_ends_lets_go(platform: str, tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "it")
    os.close(lock._descriptor)  # as the system does
    FileLock(tmp_path / "it").close()


def test_other_errors_are_not_taken_for_another_process(platform: str, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "nowhere" / "it")

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(CLibrary, "locking", broken)
    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output"):
        FileLock(tmp_path / "it")
