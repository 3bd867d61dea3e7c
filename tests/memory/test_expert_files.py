"""Reading: O_DIRECT and buffered give the same bytes, refusals fall back, errors name the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smoe.errors import CheckpointError, TransferError
from smoe.memory import expert_files
from smoe.memory.expert_files import DiskReader, identity_of
from smoe.memory.store import PAGE
from tests.memory.pages import DATA, pages


@pytest.fixture
def reader() -> Iterator[Callable[[bool], DiskReader]]:
    opened: list[DiskReader] = []

    def make(direct: bool) -> DiskReader:
        opened.append(DiskReader(direct))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


Make = Callable[[bool], DiskReader]


@pytest.mark.parametrize("chunk_pages", [1, 3, 1000])
@pytest.mark.parametrize("is_direct", [True, False])
def test_bytes_are_the_file_s(
    is_direct: bool, chunk_pages: int, path: Path, buffer: memoryview, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests, an offset, and the file's end inside the last page."""
    monkeypatch.setattr(expert_files, "REQUEST_BYTES", chunk_pages * PAGE)
    source = reader(is_direct)
    for offset, count, need in ((0, 20, None), (3 * PAGE, 5, None), (15 * PAGE, 6, 5 * PAGE + 123)):
        buffer[:] = bytes(len(buffer))
        came = source.read(pages(path, offset, count, need), buffer)
        wanted = need or count * PAGE
        assert came >= wanted
        assert bytes(buffer[:wanted]) == DATA[offset : offset + wanted]
    assert source.is_direct in (is_direct, False)  # a file system may refuse it: then buffered, and it says so


def refuse(function: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """O_DIRECT is refused by `os.<function>`, as tmpfs and some others do; counts the refusals."""
    original = getattr(os, function)
    refused: list[int] = []
    descriptors: set[int] = set()

    def fake_open(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if function == "open" and flags & os.O_DIRECT:
            refused.append(1)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        descriptor: int = opening(path, flags, *rest, **more)
        if flags & os.O_DIRECT:
            descriptors.add(descriptor)
        return descriptor

    def fake_preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if descriptor in descriptors:
            refused.append(1)
            raise OSError(errno.EINVAL, "unaligned, it says")
        count: int = original(descriptor, buffers, offset)
        return count

    opening = os.open
    monkeypatch.setattr(os, "open", fake_open)
    if function == "preadv":
        monkeypatch.setattr(os, "preadv", fake_preadv)
    return refused


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
@pytest.mark.parametrize("function", ["open", "preadv"])
def test_refused_o_direct_falls_back(
    function: str, path: Path, buffer: memoryview, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = reader(True)
    refused = refuse(function, monkeypatch)
    for _ in range(2):
        source.read(pages(path), buffer)
        assert bytes(buffer[: 20 * PAGE]) == DATA[: 20 * PAGE]
    assert refused == [1], "refused once, remembered afterwards"
    assert not source.is_direct


def test_short_reads_are_continued(
    path: Path, buffer: memoryview, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal or a network file system may give less than was asked for."""
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: original(fd, [buffers[0][:1000]], offset))
    reader(False).read(pages(path), buffer)
    assert bytes(buffer[: 20 * PAGE]) == DATA[: 20 * PAGE]


def test_a_failing_disk_is_a_transfer_error(
    path: Path, buffer: memoryview, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    for is_direct in (True, False):
        with pytest.raises(TransferError, match=r"data\.bin") as error:
            reader(is_direct).read(pages(path), buffer)
        assert error.value.errno == errno.EIO


@pytest.mark.parametrize("is_direct", [True, False])
def test_reading_past_the_end(is_direct: bool, path: Path, buffer: memoryview, reader: Make) -> None:
    """The file was cut after its header was read: an error, not an endless loop and not old bytes."""
    with pytest.raises(TransferError, match="ends early"):
        reader(is_direct).read(pages(path, 18 * PAGE, 4), buffer)


def test_a_missing_file(tmp_path: Path, buffer: memoryview, reader: Make) -> None:
    with pytest.raises(TransferError, match=r"gone\.bin") as error:
        reader(True).read(pages(tmp_path / "gone.bin"), buffer)
    assert error.value.errno == errno.ENOENT


def test_something_more_urgent_between_chunks(
    path: Path, buffer: memoryview, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_files, "CHUNK_BYTES", 4 * PAGE)
    calls: list[bytes] = []
    reader(False).read(pages(path), buffer, lambda: calls.append(bytes(buffer[:PAGE])))
    assert len(calls) == 4  # five chunks
    assert calls[0] == DATA[:PAGE]


def test_what_is_urgent_itself_is_read_in_one_request(
    path: Path, buffer: memoryview, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_files, "CHUNK_BYTES", 4 * PAGE)
    source, lengths = reader(False), []
    original = source._pread
    monkeypatch.setattr(source, "_pread", lambda fd, view, at: (lengths.append(len(view)), original(fd, view, at))[1])
    source.read(pages(path), buffer)
    assert lengths == [20 * PAGE]


def test_files_are_closed(path: Path, buffer: memoryview) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0  # noqa: PTH208
    source = DiskReader(True)
    source.read(pages(path), buffer)
    source.close()
    assert not source.is_direct
    if before:
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("is_direct", [True, False])
def test_what_passes_by_itself_is_tried_again(
    is_direct: bool, number: int, path: Path, buffer: memoryview, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded number of times: a signal, or a full queue, costs no request; for ever it is an error."""
    original, left = os.preadv, [expert_files.TRIES - 1]

    def fail_first(*arguments: Any) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(number, "not now")
        return original(*arguments)

    monkeypatch.setattr(os, "preadv", fail_first)
    monkeypatch.setattr(expert_files.time, "sleep", lambda seconds: None)
    source = reader(is_direct)
    assert source.read(pages(path), buffer) >= 20 * PAGE and left == [0]
    assert bytes(buffer[: 20 * PAGE]) == DATA[: 20 * PAGE]
    left[0] = expert_files.TRIES
    with pytest.raises(TransferError, match="not now"):
        source.read(pages(path), buffer)


def test_a_file_written_during_a_read_is_noticed(
    path: Path, buffer: memoryview, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that came may be half old, half new."""
    source, original = reader(False), os.preadv
    with path.open("rb") as file:
        source.expect({path: identity_of(file.fileno())})
    source.read(pages(path), buffer)

    def write_meanwhile(*arguments: Any) -> int:
        path.write_bytes(DATA[::-1])
        return original(*arguments)

    monkeypatch.setattr(os, "preadv", write_meanwhile)
    with pytest.raises(CheckpointError, match=r"data\.bin was written or replaced"):
        source.read(pages(path), buffer)
