"""One process at a time, by either system's lock.

Would catch a lock that two have, one that outlives its holder, and files that locks leave behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smoe import file_lock
from smoe.file_lock import FileLock
from tests.memory.fake_kernel32 import FakeKernel32, on_windows


@pytest.fixture(params=["linux", "win32"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(file_lock, "sys", SimpleNamespace(platform=request.param))
    with on_windows(FakeKernel32()):
        yield str(request.param)


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

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output"):
        FileLock(tmp_path / "it")
