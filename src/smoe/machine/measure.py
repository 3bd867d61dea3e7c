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
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from smoe.cpu_isa import AARCH64, FAMILY
from smoe.kernels.experts import Expert, TokenExperts
from smoe.kernels.isa import widest
from smoe.kernels.jit import cpu_has
from smoe.kernels.matrix import Matrix
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from smoe.machine.best_time import best_time
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
    """Return the rate of reading RAM on all threads, in bytes per second, as the best of many passes.

    `memory`: a tensor or array of at least `ENOUGH_MEMORY_BYTES` bytes to read; None: new memory is allocated.
    """
    if memory is None:
        memory = Arena([(1, _MEMORY_BYTES)], huge_pages=True).buffer(0)
        np.frombuffer(memory, np.uint8).fill(1)  # pages never written to would all be the same page of zeros
    words = np.asarray(memory[:_MEMORY_BYTES]).view(np.int64)
    threads = usable_cores()
    parts = np.array_split(words, threads)
    with ThreadPoolExecutor(threads) as pool:
        return words.nbytes / best_time(lambda: list(pool.map(np.max, parts)), seconds)


def measure_experts(expert_bytes: int, seconds: float) -> float:
    """Return the rate at which one token passes through bf16 experts that are in no cache, in bytes of weights per
    second. Our kernels compute, or torch where our kernels do not run."""
    hidden = 2048
    inner = max(64, expert_bytes // (3 * hidden * 2) // 64 * 64)
    used = 3 * hidden * inner * 2
    experts = max(2, _MEMORY_BYTES // used)
    if widest() is None:
        from smoe.machine.library_rates import measure_library_experts

        return measure_library_experts(hidden, inner, experts, seconds)
    weights = Arena([(experts, page_ceil(used))], huge_pages=True)
    np.frombuffer(weights.whole, np.uint8).fill(1)
    x, table = np.zeros((1, hidden), np.uint16), np.zeros(1 << 16, np.uint16)
    rows = np.empty((_CHOSEN, hidden), np.uint16)

    def expert_at(number: int, row: int) -> Expert:
        begin = weights.address(number)
        matrices = Matrix(begin, 2 * inner, hidden), Matrix(begin + used * 2 // 3, hidden, inner)
        return Expert(matrices, [(0, row)])

    def all_experts(kernel: TokenExperts) -> None:
        for first in range(0, experts, _CHOSEN):
            count = min(_CHOSEN, experts - first)
            kernel.forward(x, [expert_at(first + row, row) for row in range(count)], rows)

    with SpinningPool(usable_cores(), in_own_order=not is_supported()) as pool:
        kernel = TokenExperts(pool, hidden, inner, table)
        duration = best_time(lambda: all_experts(kernel), seconds)
    weights.close()
    return experts * used / duration


def measure_products(seconds: float = 0.1) -> float:
    """Return the rate of a bf16 product of many rows, in operations per second. It limits the speed of prompts.

    The rate is estimated from NumPy's float32 product and from the instructions of this CPU.
    """
    rows, matrix = np.ones((256, 1024), np.float32), np.ones((1024, 1024), np.float32)
    return _bf16_gain() * 2 * 256 * 1024 * 1024 / best_time(lambda: rows @ matrix, seconds)


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
