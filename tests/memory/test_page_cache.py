"""What is in the page cache is copied from there once, and only that."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smoe.memory import page_cache
from smoe.memory.expert_files import DiskReader, PosixFile
from smoe.memory.page_cache import CachedFile, cached_file
from smoe.memory.store import PAGE
from tests.memory.pages import DATA, SIZE, pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the page cache is examined on Linux only")


def no_cachestat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the system call cachestat, which Linux has since 6.5."""
    monkeypatch.setattr(page_cache, "_cached_pages", lambda *_: None)


@pytest.fixture(autouse=True, params=["cachestat", "mincore"])
def call(request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system call that examines files in a test."""
    if request.param == "mincore":
        no_cachestat(monkeypatch)
    else:
        with path.open("rb") as file:
            if page_cache._cached_pages(file.fileno(), 0, 1) is None:
                pytest.skip("this system has no cachestat")


def opened(path: Path) -> CachedFile | None:
    with path.open("rb") as file:
        return cached_file(path, file.fileno())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file on a disk, of which every page is in the page cache."""
    found = tmp_path / "data"
    with found.open("wb") as file:
        file.write(DATA)
        file.flush()
        os.fsync(file.fileno())  # unwritten pages cannot be dropped
    return found


@pytest.fixture
def cached(path: Path) -> Iterator[CachedFile]:
    found = opened(path)
    assert found is not None
    yield found
    found.close()


def test_a_cached_range_is_read(cached: CachedFile, buffer: memoryview) -> None:
    part = buffer[: 3 * PAGE]
    assert cached.read_into(part, 2 * PAGE, True) == 3 * PAGE
    assert bytes(part) == DATA[2 * PAGE : 5 * PAGE]


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges (offset, bytes) that the system was asked to drop from the page cache. (It may refuse: pages that were
    just written can still belong to the file system's journal.)"""
    found: list[tuple[int, int]] = []

    def noted(_: int, offset: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        found.append((offset, nbytes))

    monkeypatch.setattr(os, "posix_fadvise", noted)
    return found


@pytest.mark.parametrize("drops", [True, False])
def test_a_range_is_dropped_from_the_cache_only_if_asked(
    drops: bool, cached: CachedFile, buffer: memoryview, dropped: list[tuple[int, int]]
) -> None:
    assert cached.read_into(buffer[: 3 * PAGE], PAGE, drops) == 3 * PAGE
    assert dropped == ([(PAGE, 3 * PAGE)] if drops else [])


def test_half_a_cached_file(tmp_path: Path) -> None:
    """The second half is a hole that was never read."""
    holed = tmp_path / "holed"
    holed.write_bytes(DATA)
    os.truncate(holed, 2 * SIZE)
    found = opened(holed)
    assert found is not None
    assert found.cached_share() == pytest.approx(0.5, abs=0.05)
    found.close()


def test_the_end_of_the_file_is_within_a_page(cached: CachedFile, buffer: memoryview) -> None:
    last = SIZE // PAGE * PAGE
    assert cached.read_into(buffer[:PAGE], last, True) == SIZE - last
    assert bytes(buffer[: SIZE - last]) == DATA[last:]
    assert cached.read_into(buffer[:PAGE], last + PAGE, True) == 0


def test_a_range_of_which_a_page_is_missing_counts_as_missing(tmp_path: Path, buffer: memoryview) -> None:
    """The second half of this file is a hole that was never read."""
    holed = tmp_path / "holed"
    holed.write_bytes(DATA)
    os.truncate(holed, 64 * PAGE)
    found = opened(holed)
    assert found is not None
    assert found.read_into(buffer[: 30 * PAGE], 10 * PAGE, True) == 0
    assert found.read_into(buffer[: 10 * PAGE], 10 * PAGE, True) == 10 * PAGE
    found.close()


def test_a_file_that_is_not_cached_is_not_opened(tmp_path: Path) -> None:
    hole = tmp_path / "hole"
    hole.touch()
    os.truncate(hole, 64 * PAGE)
    assert opened(hole) is None


def test_files_of_which_cachestat_counts_no_page_are_examined_by_mincore(
    path: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in an overlay, for example."""
    monkeypatch.setattr(page_cache, "_cached_pages", lambda *_: 0)
    found = opened(path)
    assert found is not None
    assert found.cached_share() == 1
    assert found.read_into(buffer[:PAGE], PAGE, False) == PAGE
    found.close()


def test_a_range_that_begins_within_a_page(cached: CachedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a page has 16 or 64 KiB, ranges of whole blocks of 4 KiB may do so."""
    monkeypatch.setattr(page_cache.mmap, "PAGESIZE", 4 * PAGE)
    asked: list[tuple[int, int]] = []

    def counted(_: int, offset: int, nbytes: int) -> int:
        asked.append((offset, nbytes))
        return 2

    monkeypatch.setattr(page_cache, "_cached_pages", counted)
    has_cachestat = cached._begin is None
    assert cached._has(3 * PAGE, 2 * PAGE)
    assert asked == ([(0, 5 * PAGE)] if has_cachestat else [])


def test_few_ranges_are_examined_after_many_misses(
    path: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a file whose first layers are missing, and which is read from disk to its end for that."""
    examined: list[int] = []
    has = CachedFile._has

    def noted(self: CachedFile, offset: int, nbytes: int) -> bool:
        examined.append(offset)
        return has(self, offset, nbytes)

    found, beyond = opened(path), 64 * PAGE
    assert found is not None
    monkeypatch.setattr(CachedFile, "_has", noted)
    for _ in range(page_cache._MISSES + 10 * page_cache._STRIDE):
        assert found.read_into(buffer[:PAGE], beyond, False) == 0
    assert len(examined) == page_cache._MISSES + 10
    came = [found.read_into(buffer[:PAGE], 0, False) for _ in range(2 * page_cache._STRIDE)]
    assert came.count(0) < page_cache._STRIDE
    assert came[page_cache._STRIDE :] == [PAGE] * page_cache._STRIDE  # every range again
    found.close()


@pytest.mark.parametrize("cached_first", [True, False])
def test_a_reader_takes_cached_bytes_from_memory(
    cached_first: bool, path: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct reads are what remains; without `cached_first` everything is read directly."""
    direct: list[int] = []
    read_into = PosixFile.read_into

    def counted(self: PosixFile, part: memoryview, offset: int) -> int:
        direct.append(offset)
        return read_into(self, part, offset)

    monkeypatch.setattr(PosixFile, "read_into", counted)
    reader = DiskReader(True, cached_first=cached_first)
    try:
        reader.read(pages(path, 0, 4), buffer)
        if not reader.is_direct:
            pytest.skip("this file system refuses direct reads")
        assert bytes(buffer[: 4 * PAGE]) == DATA[: 4 * PAGE]
        assert direct == ([] if cached_first else [0])
    finally:
        reader.close()


@pytest.mark.parametrize("is_kept", [True, False])
def test_bytes_that_do_not_stay_in_memory_stay_in_the_cache(
    is_kept: bool, path: Path, buffer: memoryview, dropped: list[tuple[int, int]]
) -> None:
    """Otherwise they would have to be read from disk when they are needed again."""
    reader = DiskReader(True, cached_first=True)
    try:
        reader.read(pages(path, PAGE, 4), buffer, is_kept=is_kept)
        if not reader.is_direct:
            pytest.skip("this file system refuses direct reads")
        assert reader.cached_share([path]) == 1
        assert dropped == ([(PAGE, 4 * PAGE)] if is_kept else [])
    finally:
        reader.close()


def test_no_share_of_a_file_counts_as_cached_without_copies_from_the_cache(path: Path) -> None:
    reader = DiskReader(True)
    try:
        assert reader.cached_share([path]) == 0
    finally:
        reader.close()


def test_another_user_s_file_is_not_examined(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of such a file mincore says that every page is cached."""
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert opened(path) is None


def test_another_file_of_the_same_name_is_not_read(path: Path) -> None:
    with path.open("rb") as file:
        path.unlink()
        path.write_bytes(DATA[::-1])
        assert cached_file(path, file.fileno()) is None


def test_a_file_that_cannot_be_mapped_is_read_directly(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the address space is limited, for example."""

    def refuse(*_: int) -> int:
        raise OSError(errno.ENOMEM, "no address space left")

    no_cachestat(monkeypatch)
    monkeypatch.setattr(page_cache, "_mapped", refuse)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    assert opened(path) is None
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
