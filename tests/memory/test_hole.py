"""Files that are longer than what is in them, on two systems."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from smoe.memory import hole
from smoe.memory.hole import lengthen
from tests.memory.fake_kernel32 import FakeKernel32, on_windows

MIB = 2**20


def fill(file: IO[bytes]) -> None:
    """As headers are fetched: a piece, the whole length, more of it."""
    for piece in (b"one", b"two"):
        file.write(piece)
        lengthen(file, 100 * MIB)


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_what_is_not_written_takes_no_room(platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, library = tmp_path / "f", FakeKernel32()
    with on_windows(library), path.open("wb") as file:
        monkeypatch.setattr(hole, "sys", SimpleNamespace(platform=platform))
        fill(file)
        assert library.sparse == ({file.fileno()} if platform == "win32" else set())
    found = path.stat()
    assert found.st_size == 100 * MIB and found.st_blocks * 512 < MIB
    with path.open("rb") as read:
        assert read.read(10) == b"onetwo\0\0\0\0"


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_what_is_longer_stays_as_it_is(platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    with on_windows(FakeKernel32()), path.open("wb") as file:
        monkeypatch.setattr(hole, "sys", SimpleNamespace(platform=platform))
        file.write(b"three pieces")
        file.seek(5)
        lengthen(file, 8)
        assert file.tell() == 5
    assert path.read_bytes() == b"three pieces"
