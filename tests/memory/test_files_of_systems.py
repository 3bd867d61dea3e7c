"""Files that experts are read from, as three systems have them: the same bytes, or a word why not.

macOS and Windows are played by stand-ins that refuse what those systems refuse. Would catch: threads that move one
file's position for each other, the end of a file taken for an error.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from smoe.errors import CheckpointError, TransferError
from smoe.memory import expert_files
from smoe.memory.arena import Arena
from smoe.memory.expert_files import BufferedFile, DiskReader, ExpertFile, PosixFile, identity_of, opening
from smoe.memory.store import PAGE, Read
from tests.memory.pages import DATA, pages

F_NOCACHE = 48


class Mac:
    """`fcntl` as macOS has it, on a system without O_DIRECT."""

    opened = PosixFile

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.uncached: list[int] = []
        self.refuses = False
        patch.delattr(os, "O_DIRECT", raising=False)
        patch.delattr(os, "posix_fadvise", raising=False)
        patch.setattr(fcntl, "F_NOCACHE", F_NOCACHE, raising=False)
        patch.setattr(fcntl, "fcntl", self.fcntl)

    def fcntl(self, descriptor: int, command: int, value: int) -> int:
        assert (command, value) == (F_NOCACHE, 1)
        if self.refuses:
            raise OSError(errno.ENOTSUP, "Operation not supported")
        self.uncached.append(descriptor)
        return 0


class Windows:
    """Has neither positional reads nor reads past the cache."""

    opened = BufferedFile


@pytest.fixture(params=["macOS", "macOS before 11", "Windows"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, with `opened`: how its files are opened."""
    if request.param == "Windows":
        for name in ("pread", "preadv", "posix_fadvise"):
            monkeypatch.delattr(os, name, raising=False)
        return Windows()
    played = Mac(monkeypatch)
    if request.param == "macOS before 11":
        monkeypatch.delattr(os, "preadv")
    return played


def bytes_of(reader: DiskReader, read: Read, buffer: memoryview) -> bytes:
    buffer[:] = bytes(len(buffer))
    assert reader.read(read, buffer) >= read.need
    return bytes(buffer[: read.need])


def closing(reader: DiskReader, stack: ExitStack) -> DiskReader:
    stack.callback(reader.close)
    return reader


@pytest.mark.parametrize("is_direct", [True, False])
def test_bytes_are_the_file_s(
    system: Any, is_direct: bool, path: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests, an offset, and the file's end inside the last page."""
    monkeypatch.setattr(expert_files, "REQUEST_BYTES", 3 * PAGE)
    with ExitStack() as stack:
        reader = closing(DiskReader(is_direct, system.opened), stack)
        for read in (pages(path), pages(path, 3 * PAGE, 5), pages(path, 15 * PAGE, 6, 5 * PAGE + 123)):
            assert bytes_of(reader, read, buffer) == DATA[read.offset : read.offset + read.need]
        assert reader.is_direct is (is_direct and isinstance(system, Mac))
        with pytest.raises(TransferError, match="ends early"):
            reader.read(pages(path, 18 * PAGE, 4), buffer)
    if isinstance(system, Mac):
        assert bool(system.uncached) is is_direct


def test_threads_read_beside_each_other(system: Any, path: Path) -> None:
    arena = Arena([(8, PAGE)], torch.device("cpu"))
    with ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        reader = closing(DiskReader(True, system.opened), stack)

        def read(n: int) -> bool:
            into = arena.buffer(n % 8)
            reader.read(pages(path, n % 20 * PAGE, 1), into)
            return bytes(into) == DATA[n % 20 * PAGE : (n % 20 + 1) * PAGE]

        for first in range(0, 200, 8):
            assert all(threads.map(read, range(first, first + 8)))


def test_where_reading_directly_is_refused_it_is_buffered(
    path: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    Mac(monkeypatch).refuses = True
    with ExitStack() as stack:
        reader = closing(DiskReader(True, PosixFile), stack)
        assert bytes_of(reader, pages(path), buffer) == DATA[: 20 * PAGE]
        assert not reader.is_direct


def test_what_macos_refuses_is_closed_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed, really = [], [], (os.open, os.close)

    def opening_it(*told: Any) -> int:
        opened.append(really[0](*told))
        return opened[-1]

    with monkeypatch.context() as patch:
        Mac(patch).refuses = True
        patch.setattr(os, "open", opening_it)
        patch.setattr(os, "close", closed.append)
        with pytest.raises(OSError, match="past the page cache"):
            PosixFile(path, True)
    for descriptor in opened:
        really[1](descriptor)
    assert len(opened) == 1 and closed == opened


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot be told")
def test_the_system_is_told_what_need_not_stay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, nbytes, advice: told.append((offset, nbytes, advice)))
    file = PosixFile(path, False)
    file.forget(3 * PAGE, 2 * PAGE)
    file.close()
    assert told == [(3 * PAGE, 2 * PAGE, os.POSIX_FADV_DONTNEED)]


def test_a_missing_file_and_a_written_one(system: Any, path: Path, buffer: memoryview) -> None:
    with ExitStack() as stack:
        reader = closing(DiskReader(True, system.opened), stack)
        with pytest.raises(TransferError, match=r"gone\.bin") as error:
            reader.read(pages(path.with_name("gone.bin")), buffer)
        assert error.value.errno == errno.ENOENT
        with path.open("rb") as file:
            reader.expect({path: identity_of(file.fileno())})
        reader.read(pages(path), buffer)
        path.write_bytes(DATA[1:])
        with pytest.raises(CheckpointError, match="was written or replaced"):
            reader.read(pages(path), buffer)


@pytest.mark.parametrize(
    ("platform", "name", "of"),
    [("linux", "O_DIRECT", PosixFile), ("darwin", "F_NOCACHE", PosixFile), ("win32", "O_DIRECT", BufferedFile)],
)
def test_each_system_has_its_way(
    platform: str, name: str, of: Callable[[Path, bool], ExpertFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_files.sys, "platform", platform)
    assert opening() is of and expert_files.direct_name() == name
