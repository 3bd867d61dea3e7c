"""The measured profile of this machine: the rates of its memory, disk, link and expert arithmetic.

`smoe doctor` measures and stores it. Summaries, `smoe plan` and `smoe bench` use it for the floor of the time per
token. A profile contains its conditions (date, machine, versions, threads), and is used only on the machine where it
was made.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from smoe.cpu_isa import AARCH64, FAMILY
from smoe.kernels.expert_work import Expert
from smoe.kernels.experts import TokenExperts
from smoe.kernels.isa import widest
from smoe.kernels.jit import cpu_has
from smoe.kernels.matrix import Matrix
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from smoe.machine.best_time import ranked_time
from smoe.machine.device import AnyDevice, gpu_names
from smoe.machine.disk_rates import measure_disk
from smoe.machine.floor import Rates
from smoe.machine.processor import processor_name, usable_cores
from smoe.memory.arena import Arena
from smoe.memory.emulation import DeviceProfile
from smoe.memory.store import page_ceil
from smoe.user_cache import cache_folder, keep

_MEMORY_BYTES = 256 * 2**20
"""The bytes of memory to read: far more than the caches of a core. The large caches of servers are shared among
cores."""
_CHOSEN = 8
"""The number of experts per token, which are computed together."""
_PIECE_BYTES = 4 * 2**20
"""The bytes of memory that a thread reads between two looks at the clock."""
_MOST_EXPERT_BYTES = 16 * 2**20
"""The largest experts, and the most bytes of experts in one call, with which the arithmetic is measured. Larger ones
are computed at the same rate."""
_UNDISTURBED = 0.05
"""The fraction of the calls that are faster than the call that counts."""
ENOUGH_MEMORY_BYTES = 64 * 2**20
"""The least memory for a measurement. Too much of a smaller range would be in the processor's caches."""
_BF16_GAIN, _BF16_LOSS = 4.0, 0.22
"""The speed of torch's bf16 products of many rows, relative to float32: with AVX-512 BF16, and with only AVX2
(docs/log/kernels.md)."""


@dataclass(frozen=True)
class Profile:
    """The measured rates of this machine, which `smoe doctor` stores. Rates are in bytes per second."""

    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    threads: int
    memory_bytes_per_second: float
    disk_bytes_per_second: float
    disk_request_bytes: int
    disk_is_direct: bool
    expert_bytes_per_second: float
    """The bytes of weights per second when one token passes through one expert after the other."""
    link_bytes_per_second: float | None = None
    device_memory_bytes_per_second: float | None = None
    products_per_second: float | None = None
    """The operations per second in torch's products of many rows."""

    def rates(self, device: AnyDevice) -> Rates:
        """Return the rates from which the floor of the time per token is computed, for a run on `device`."""
        source = f"profile of {self.date[:10]}"
        if device.type == "cuda" and self.device_memory_bytes_per_second is not None:
            memory, link = self.device_memory_bytes_per_second, self.link_bytes_per_second
            return Rates(memory, self.disk_bytes_per_second, link, source)
        return Rates(self.memory_bytes_per_second, self.disk_bytes_per_second, None, source)


def emulated_rates(profile: DeviceProfile) -> Rates:
    """Return the rates for the floor of a run on an emulated device: the rates of its profile, without the disk.

    The disk is not emulated. Once experts have been read from disk, they are loaded from the host tier.
    """
    source = f"profile {profile.name}, emulated"
    return Rates(profile.device_bytes_per_second, None, profile.link_bytes_per_second, source)


def profile_path() -> Path:
    """Return the path of this machine's profile: `smoe/profile.json` in the user's cache folder."""
    return cache_folder() / "profile.json"


def load_profile() -> Profile | None:
    """Return the stored profile if it was made on this machine, else None."""
    try:
        stored = json.loads(profile_path().read_text(encoding="utf8"))
        known = {field.name for field in fields(Profile)}
        profile = Profile(**{name: value for name, value in stored.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return profile if profile.machine == describe_machine() else None


def save_profile(profile: Profile) -> Path:
    """Store the profile for later commands, atomically. Return the path. Raises `OSError`."""
    return keep(profile_path(), asdict(profile))


def describe_machine() -> dict[str, Any]:
    """Return a description of this machine. A profile contains it, so that its use on another machine can be
    detected."""
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpus": gpu_names(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of the software on which results depend."""
    import torch
    import transformers

    import smoe

    return {
        "smoe": smoe.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def measure(folder: Path, expert_bytes: int, say: Callable[[str], None]) -> Profile:
    """Return a profile after measuring all rates, which takes a few seconds. `folder` is on the disk to measure.
    `expert_bytes`: the size of an expert. `say` is called with the name of each measurement."""
    say("memory")
    memory = measure_memory(1.0)
    say("disk")
    disk, is_direct = measure_disk(folder, expert_bytes, seconds=2.0, file_bytes=512 * 2**20)
    from smoe.machine.library_rates import measure_library_products

    say("expert arithmetic")
    arithmetic = measure_experts(expert_bytes, seconds=1.0)
    link = device_memory = None
    if gpu_names():
        from smoe.machine.gpu_rates import measure_device_memory, measure_link

        say("GPU link and memory")
        link, device_memory = measure_link(), measure_device_memory()
    return Profile(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=describe_machine(),
        versions=describe_versions(),
        threads=usable_cores(),
        memory_bytes_per_second=memory,
        disk_bytes_per_second=disk,
        disk_request_bytes=expert_bytes,
        disk_is_direct=is_direct,
        expert_bytes_per_second=arithmetic,
        link_bytes_per_second=link,
        device_memory_bytes_per_second=device_memory,
        products_per_second=measure_library_products(0.5),
    )


def measure_memory(seconds: float, memory: Any = None) -> float:
    """Return the rate of reading RAM on all threads, in bytes per second.

    `memory`: a tensor or array of at least `ENOUGH_MEMORY_BYTES` bytes to read; None: new memory is allocated. Each
    thread reads pieces of a millisecond or less, and its median time for a piece counts: most pieces are read without
    an interruption even if other programs use the cores.
    """
    if memory is None:
        memory = written_memory().buffer(0)
    words = np.asarray(memory[:_MEMORY_BYTES]).view(np.int64)
    threads = usable_cores()

    def rate_of(part: np.ndarray) -> float:
        """Return the rate of the median piece of `part`."""
        count = max(1, part.nbytes // _PIECE_BYTES)
        pieces = cycle(np.array_split(part, count))
        return part.nbytes / count / ranked_time(lambda: next(pieces).max(), seconds, rank=0.5)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(rate_of, np.array_split(words, threads)))


def written_memory() -> Arena:
    """Return new memory for measurements, in one buffer. Every page has been written, because pages never written to
    would all be the same page of zeros."""
    arena = Arena([(1, _MEMORY_BYTES)], huge_pages=True)
    np.frombuffer(arena.whole, np.uint8).fill(1)
    return arena


def measure_experts(expert_bytes: int, seconds: float, weights: Arena | None = None) -> float:
    """Return the rate at which one token passes through bf16 experts that are in no cache, in bytes of weights per
    second. Our kernels compute, or torch where our kernels do not run. `weights`: memory from `written_memory`; None:
    new memory is allocated.

    A fast call counts (`_UNDISTURBED`), not the mean: a call that other programs interrupt takes many times as long,
    because all threads wait for the interrupted one. For the same reason the measured experts are at most
    `_MOST_EXPERT_BYTES` large.
    """
    hidden = 2048
    inner = max(64, min(expert_bytes, _MOST_EXPERT_BYTES) // (3 * hidden * 2) // 64 * 64)
    used = 3 * hidden * inner * 2
    each = page_ceil(used)
    experts = _MEMORY_BYTES // each
    if widest() is None:
        from smoe.machine.library_rates import measure_library_experts

        return measure_library_experts(hidden, inner, experts, seconds)
    arena = written_memory() if weights is None else weights
    x, table = np.zeros((1, hidden), np.uint16), np.zeros(1 << 16, np.uint16)
    together = max(1, min(_CHOSEN, _MOST_EXPERT_BYTES // used, experts))
    rows = np.empty((together, hidden), np.uint16)

    def expert_at(number: int, row: int) -> Expert:
        begin = arena.address(0) + number * each
        matrices = Matrix(begin, 2 * inner, hidden), Matrix(begin + used * 2 // 3, hidden, inner)
        return Expert(matrices, [(0, row)])

    firsts = range(0, experts - together + 1, together)
    calls = cycle([expert_at(first + row, row) for row in range(together)] for first in firsts)
    with SpinningPool(usable_cores(), in_own_order=not is_supported()) as pool:
        kernel = TokenExperts(pool, hidden, inner, table)
        kernel.forward(x, next(calls), rows)
        found = ranked_time(lambda: kernel.forward(x, next(calls), rows), seconds, _UNDISTURBED)
    if weights is None:
        arena.close()
    return together * used / found


def measure_products(seconds: float = 0.1) -> float:
    """Return the rate of bf16 products of many rows, in operations per second. It limits the speed of prompts.

    The rate is estimated from NumPy's float32 product and from the instructions of this CPU. Every core computes
    products of its own, of a few milliseconds, of which a fast one counts. NumPy must use one thread for a product
    (`quick_look.py`): threads of one product wait for those that other programs interrupt.
    """

    def product_seconds(_: int) -> float:
        rows, matrix = np.ones((64, 1024), np.float32), np.ones((1024, 512), np.float32)
        rows @ matrix
        return ranked_time(lambda: rows @ matrix, seconds, _UNDISTURBED)

    threads = usable_cores()
    with ThreadPoolExecutor(threads) as pool:
        operations = 2 * 64 * 1024 * 512
        return _bf16_gain() * sum(operations / each for each in pool.map(product_seconds, range(threads)))


def _bf16_gain() -> float:
    """Return how many times faster torch's bf16 products are than float32 products."""
    if FAMILY == AARCH64:
        return 1.0
    return _BF16_GAIN if cpu_has("avx512bf16") else _BF16_LOSS


def quick_rates(device: AnyDevice, memory: Any = None) -> Rates:
    """Return the rates of the stored profile. If no profile is stored, measure only the memory, in 0.2 s (on a GPU also
    the link).

    The measurement reads `memory` if it is given. If `memory` is too small, another process measures, so that this
    process allocates nothing outside its memory budget.
    """
    profile = load_profile()
    if profile is not None:
        return profile.rates(device)
    if device.type == "cuda":
        from smoe.machine.gpu_rates import measure_device_memory, measure_link

        return Rates(measure_device_memory(), None, measure_link(), "a quick measurement")
    if memory is not None and len(memory) < ENOUGH_MEMORY_BYTES:
        from smoe.machine.quick_look import memory_rate

        return Rates(memory_rate(), None, None, "a quick measurement")
    return Rates(measure_memory(0.2, memory), None, None, "a quick measurement")
