"""The circumstances of a measurement: what memory and disk deliver now, and how much of the CPU others take.

Shared machines change by a factor of two within the hour, so every round of a comparison carries these numbers and is
marked when they are poor. Everything is read with NumPy and the standard library; no compiler, no tool to install.

    python -m bench.peers.conditions --files DIR/*.safetensors     # the ceilings of this machine
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

MEMORY_BUFFER_BYTES = 1 << 30  # many times any last-level cache we are given a share of
SECTOR_BYTES = 4096  # alignment O_DIRECT asks for
OTHERS_CPU_LIMIT = 0.08  # above this share of one core a round is marked as disturbed


@dataclass(frozen=True)
class CpuUse:
    """CPU time of a period, as shares of one core (2.0 = two cores busy)."""

    seconds: float
    """Length of the period."""
    ours: float
    """This process and the children it has waited for."""
    others: float
    """All else that ran, kernel threads included (writeback and reclaim done for us count as others)."""
    steal: float
    """Time the hypervisor gave to other guests."""

    @property
    def disturbed(self) -> bool:
        """Whether others took more than `OTHERS_CPU_LIMIT`."""
        return self.others + self.steal > OTHERS_CPU_LIMIT


@dataclass(frozen=True)
class Ceilings:
    """What the machine delivers at this moment; None = could not be measured."""

    memory_bytes_per_second: float
    """Sequential read of main memory with as many threads as the engines use."""
    disk_bytes_per_second: float | None
    """Random reads of one expert's size past the page cache, one at a time."""
    disk_two_readers_bytes_per_second: float | None
    """The same with two readers."""


def ceilings(files: Sequence[Path], block_bytes: int, threads: int, seconds: float = 1.0) -> Ceilings:
    """Measure memory and disk for about `seconds` each."""
    return Ceilings(
        memory_bytes_per_second=memory_read_rate(threads, seconds),
        disk_bytes_per_second=disk_read_rate(files, block_bytes, 1, seconds),
        disk_two_readers_bytes_per_second=disk_read_rate(files, block_bytes, 2, seconds),
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_read_rate(threads: int, seconds: float = 1.0, buffer_bytes: int = MEMORY_BUFFER_BYTES) -> float:
    """Median bytes per second of reading a large buffer with `threads` threads.

    An integer maximum costs less than the loads it waits for, and NumPy releases the interpreter lock around it; the
    result agrees with a hand-written vector loop (README).
    """
    parts = np.array_split(np.ones(buffer_bytes // 8, dtype=np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return median(_rates(lambda: sum(pool.map(np.max, parts)) and buffer_bytes, seconds))


def _rates(read_once: Callable[[], int], seconds: float) -> list[float]:
    """Bytes per second of each call of `read_once` (returns the bytes it read) until `seconds` are over; at least 3."""
    read_once()
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while len(rates) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        done_bytes = read_once()
        rates.append(done_bytes / (time.perf_counter() - start))
    return rates


# --- disk -------------------------------------------------------------------------------------------------------------


def disk_read_rate(
    files: Sequence[Path], block_bytes: int, readers: int, seconds: float = 1.0, seed: int = 0
) -> float | None:
    """Bytes per second of random reads of `block_bytes` from `files` with O_DIRECT; None where that is not possible.

    Each of the `readers` threads keeps one request in flight. Reading past the page cache leaves the cache as it is.
    """
    block_bytes = -(-block_bytes // SECTOR_BYTES) * SECTOR_BYTES
    try:
        with _open_direct(files, block_bytes) as handles:
            return _read_at_random(handles, block_bytes, readers, seconds, seed)
    except OSError:  # no O_DIRECT on this file system (tmpfs, some overlays): the caller prints "-"
        return None


@contextmanager
def _open_direct(files: Sequence[Path], block_bytes: int) -> Iterator[list[tuple[int, int]]]:
    """File descriptors opened with O_DIRECT, each with the number of blocks in its file."""
    if not hasattr(os, "O_DIRECT"):
        raise OSError("this platform has no O_DIRECT")
    handles: list[tuple[int, int]] = []
    try:
        for path in files:
            blocks = path.stat().st_size // block_bytes
            if blocks:
                handles.append((os.open(path, os.O_RDONLY | os.O_DIRECT), blocks))
        if not handles:
            raise OSError(f"no file holds {block_bytes} bytes")
        yield handles
    finally:
        for descriptor, _ in handles:
            os.close(descriptor)


def _read_at_random(
    handles: Sequence[tuple[int, int]], block_bytes: int, readers: int, seconds: float, seed: int
) -> float:
    start = time.perf_counter()
    end = start + seconds

    def reader(number: int) -> int:
        draw = random.Random(seed + number)
        done_bytes = 0
        with mmap.mmap(-1, block_bytes) as buffer:  # page aligned, as O_DIRECT wants it
            while time.perf_counter() < end:
                descriptor, blocks = draw.choices(handles, weights=[blocks for _, blocks in handles])[0]
                done_bytes += os.preadv(descriptor, [buffer], draw.randrange(blocks) * block_bytes)
        return done_bytes

    with ThreadPoolExecutor(readers) as pool:
        total_bytes = sum(pool.map(reader, range(readers)))
    return total_bytes / (time.perf_counter() - start)


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Write dirty pages of `files` to disk and forget the cached ones.

    Needed before every capped run: a cached page is charged to the group that read it first, so leftovers of an earlier
    round would be memory for free.
    """
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_into_page_cache(files: Sequence[Path]) -> None:
    """Read `files` once, so that a run without a limit starts from memory."""
    buffer = bytearray(8 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


# --- CPU --------------------------------------------------------------------------------------------------------------


class CpuWatch:
    """Context manager: `use` holds who used the CPU inside the block. Wait for child processes before leaving it."""

    use: CpuUse

    def __enter__(self) -> CpuWatch:
        self._start = (time.perf_counter(), *_machine_cpu_seconds(), _own_cpu_seconds())
        return self

    def __exit__(self, *_: object) -> None:
        end = (time.perf_counter(), *_machine_cpu_seconds(), _own_cpu_seconds())
        wall, busy, steal, own = (now - then for now, then in zip(end, self._start, strict=True))
        self.use = CpuUse(wall, own / wall, max(0.0, busy - own) / wall, steal / wall)


def _machine_cpu_seconds() -> tuple[float, float]:
    """(busy, stolen) CPU seconds of the whole machine since boot; zeros where /proc/stat does not exist."""
    try:
        with Path("/proc/stat").open(encoding="ascii") as file:
            return cpu_seconds(file.readline(), os.sysconf("SC_CLK_TCK"))
    except FileNotFoundError:
        return 0.0, 0.0


def cpu_seconds(stat_line: str, ticks_per_second: int) -> tuple[float, float]:
    """(busy, stolen) seconds from the first line of /proc/stat. Busy: user, nice, system, interrupts."""
    user, nice, system, _idle, _wait, irq, soft_irq, steal = (int(word) for word in stat_line.split()[1:9])
    return (user + nice + system + irq + soft_irq) / ticks_per_second, steal / ticks_per_second


def _own_cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def wait_until_quiet(limit: float = OTHERS_CPU_LIMIT, patience_seconds: float = 20.0) -> bool:
    """Wait until others use less than `limit` of a core for half a second; False when patience ran out."""
    end = time.perf_counter() + patience_seconds
    while True:
        with CpuWatch() as watch:
            time.sleep(0.5)
        if watch.use.others + watch.use.steal < limit:
            return True
        if time.perf_counter() > end:
            return False


def set_priority(process_id: int, nice: int) -> None:
    """Give a session leader this priority, and its session too: with autogrouping, nice counts inside sessions only."""
    os.setpriority(os.PRIO_PROCESS, process_id, nice)
    autogroup = Path(f"/proc/{process_id}/autogroup")
    if autogroup.exists():
        autogroup.write_text(str(nice))


# --- machine ----------------------------------------------------------------------------------------------------------

NOTABLE_CPU_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def machine() -> dict[str, object]:
    """CPU, memory and operating system, without host name or addresses."""
    cpu_lines = _key_values(Path("/proc/cpuinfo"))
    memory_kib = int(_key_values(Path("/proc/meminfo")).get("MemTotal", "0 kB").split()[0])
    flags = cpu_lines.get("flags", "").split()
    return {
        "cpu": cpu_lines.get("model name", platform.processor() or platform.machine()),
        "cpu_family_and_model": f"{cpu_lines.get('cpu family', '?')}, {cpu_lines.get('model', '?')}",
        "cpu_flags": [flag for flag in NOTABLE_CPU_FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "virtual": "hypervisor" in flags,
        "memory_bytes": memory_kib * 1024,
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
    }


def _key_values(path: Path) -> dict[str, str]:
    """`key : value` lines of a /proc file, the first of each key; empty where the file does not exist."""
    found: dict[str, str] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    return found


def main() -> None:
    """Print this machine's ceilings as a table, then as one line of JSON."""
    parser = argparse.ArgumentParser(description="Measure memory and disk ceilings.")
    parser.add_argument("--files", type=Path, nargs="+", required=True, help="large files to read from")
    parser.add_argument("--block-mb", type=float, nargs="+", default=[9.44, 4.0], help="request sizes, 1e6 bytes")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    options = parser.parse_args()
    rates: dict[str, float | None] = {}
    with CpuWatch() as watch:
        for threads in sorted({1, options.threads}):
            rates[f"memory read, {threads} threads"] = memory_read_rate(threads, options.seconds)
        for block_mb in options.block_mb:
            for readers in (1, 2):
                name = f"disk read {block_mb:g} MB, {readers} at a time"
                rates[name] = disk_read_rate(options.files, int(block_mb * 1e6), readers, options.seconds)
    for name, rate in rates.items():
        print(f"{name:32s}" + ("      -" if rate is None else f"{rate / 1e9:7.2f} GB/s"))
    print(f"others used {watch.use.others:.0%} of a core, steal {watch.use.steal:.0%}")
    print(json.dumps({"machine": machine(), "bytes_per_second": rates, "cpu": asdict(watch.use)}))


if __name__ == "__main__":
    main()
