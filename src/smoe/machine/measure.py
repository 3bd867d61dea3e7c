"""The measured hardware profile: how fast this machine's memory, disk, link and expert arithmetic are.

`smoe doctor` measures and stores it; summaries, `smoe plan` and `smoe bench` read it for the floor of the time per
token. A profile carries its circumstances (date, machine, versions, threads) and is used only on the machine that it
was made on.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch

from smoe.kernels.elementwise import activation_table
from smoe.kernels.experts import Expert, TokenExperts
from smoe.kernels.isa import widest
from smoe.kernels.matrix import in_bf16
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from smoe.machine.disk_rates import measure_disk
from smoe.machine.floor import Rates
from smoe.machine.processor import processor_name, usable_cores
from smoe.memory.arena import Arena
from smoe.memory.emulation import MEASURED, DeviceProfile
from smoe.user_cache import cache_folder, keep

_MEMORY_BYTES = 256 * 2**20
"""Far beyond every cache of a core; large server caches are shared, so a run does not own them either."""
_CHOSEN = 8
"""Experts of a token, computed together."""
_LINK_BYTES = 256 * 2**20
_ENOUGH_MEMORY_BYTES = 64 * 2**20
_LAYER_SECONDS, _WIDTH_SECONDS = 0.4e-3, 0.09e-3
"""What a decoder layer takes beside moving its bytes, on the CPUs that were measured: small operations and Python
(docs/log.md); and more for every 1024 numbers of the hidden state."""
_CPU_EXPERT_SECONDS = 10e-6
"""What one expert takes a CPU beside moving its bytes, where all of a layer's are computed in one piece."""
_READ_SECONDS = 150e-6
"""From asking for an expert on disk to the first byte of it, and handing the read one over."""
_COPY_SECONDS, _LAUNCH_SECONDS, _LAUNCHES_SECONDS, _HAND_OVER_SECONDS = 20e-6, 40e-6, 300e-6, 50e-6
"""Beside a device: of one copy, of an expert's kernels, of a layer's others, of an expert given to the CPU."""


@dataclass(frozen=True)
class Profile:
    """What `smoe doctor` found. Rates are bytes per second."""

    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    threads: int
    memory_bytes_per_second: float
    disk_bytes_per_second: float
    disk_request_bytes: int
    disk_is_direct: bool
    expert_bytes_per_second: float
    """Stored weight bytes of one expert computed for one token, per second."""
    link_bytes_per_second: float | None = None
    device_memory_bytes_per_second: float | None = None

    def rates(self, device: torch.device) -> Rates:
        """The figures that the floor of a run on `device` needs."""
        source = f"profile of {self.date[:10]}"
        if device.type == "cuda" and self.device_memory_bytes_per_second is not None:
            memory, link = self.device_memory_bytes_per_second, self.link_bytes_per_second
            return Rates(memory, self.disk_bytes_per_second, link, source)
        return Rates(self.memory_bytes_per_second, self.disk_bytes_per_second, None, source)


def emulated_rates(profile: DeviceProfile) -> Rates:
    """The figures that the floor of a run on an emulated device needs: the profile's, the disk left out.

    The disk stays real; experts come from the host tier, once they have been read.
    """
    source = f"profile {profile.name}, emulated"
    return Rates(profile.device_bytes_per_second, None, profile.link_bytes_per_second, source)


def profile_path() -> Path:
    """Where the profile lies: `smoe/profile.json` in the user's cache folder."""
    return cache_folder() / "profile.json"


def load_profile() -> Profile | None:
    """The stored profile if it was made on this machine by this format, else None."""
    try:
        stored = json.loads(profile_path().read_text(encoding="utf8"))
        known = {field.name for field in fields(Profile)}
        profile = Profile(**{name: value for name, value in stored.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return profile if profile.machine == describe_machine() else None


def save_profile(profile: Profile) -> Path:
    """Store it for later commands; appears whole or not at all. Raises `OSError`."""
    return keep(profile_path(), asdict(profile))


def describe_machine() -> dict[str, Any]:
    """What the figures belong to."""
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """The software that results depend on."""
    import transformers

    import smoe

    return {
        "smoe": smoe.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def measure(folder: Path, expert_bytes: int, say: Callable[[str], None]) -> Profile:
    """Measure everything; takes a few seconds. `folder` is on the disk in question, `say` hears what is being
    measured."""
    say("memory")
    memory = measure_memory(1.0)
    say("disk")
    disk, is_direct = measure_disk(folder, expert_bytes, seconds=2.0, file_bytes=512 * 2**20)
    say("expert arithmetic")
    arithmetic = measure_experts(expert_bytes, seconds=1.0)
    link = device_memory = None
    if torch.cuda.is_available():
        say("GPU link and memory")
        link, device_memory = measure_link(), measure_device_memory()
    return Profile(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=describe_machine(),
        versions=describe_versions(),
        threads=torch.get_num_threads(),
        memory_bytes_per_second=memory,
        disk_bytes_per_second=disk,
        disk_request_bytes=expert_bytes,
        disk_is_direct=is_direct,
        expert_bytes_per_second=arithmetic,
        link_bytes_per_second=link,
        device_memory_bytes_per_second=device_memory,
    )


def measure_memory(seconds: float, memory: torch.Tensor | None = None) -> float:
    """Bytes per second of reading RAM on torch's threads; the best of many passes, as a limit should be.

    Reads `memory` (uint8) where it is large enough, so that nothing is allocated beside a budget; else 64 MiB of its
    own.
    """
    if memory is None or memory.numel() < _ENOUGH_MEMORY_BYTES:
        own_bytes = _MEMORY_BYTES if memory is None else _ENOUGH_MEMORY_BYTES
        memory = Arena([(1, own_bytes)], torch.device("cpu"), huge_pages=True).bytes
        memory.fill_(1)  # pages never written to would all be one and the same page of zeros
    words = memory[:_MEMORY_BYTES].view(torch.int64)
    return words.numel() * 8 / _best(lambda: words.sum(), seconds)


def measure_experts(expert_bytes: int, seconds: float) -> float:
    """Weight bytes per second of computing one token through bf16 experts that are not in a core's cache."""
    hidden = 2048
    inner = max(64, expert_bytes // (3 * hidden * 2) // 64 * 64)
    used = 3 * hidden * inner * 2
    experts = max(2, _MEMORY_BYTES // used)
    up = torch.zeros(experts, 2 * inner, hidden, dtype=torch.bfloat16)
    down = torch.zeros(experts, hidden, inner, dtype=torch.bfloat16)
    x = torch.zeros(1, hidden, dtype=torch.bfloat16)

    def all_experts() -> None:
        for n in range(experts):
            torch.nn.functional.linear(_gated(torch.nn.functional.linear(x, up[n])), down[n])

    def all_in_one_piece(kernel: TokenExperts) -> None:
        for first in range(0, experts, _CHOSEN):
            count = min(_CHOSEN, experts - first)
            together = [Expert(in_bf16(up[first + row].t(), down[first + row].t()), [(0, row)]) for row in range(count)]
            kernel.forward(x, together, rows)

    with torch.no_grad():
        duration = _best(all_experts, seconds)
        if widest() is not None:
            table, rows = activation_table(_gated), x.new_empty(_CHOSEN, hidden)
            assert table is not None, "a gated activation"
            with SpinningPool(torch.get_num_threads(), in_own_order=not is_supported()) as pool:
                kernel = TokenExperts(pool, hidden, inner, table)
                duration = min(duration, _best(lambda: all_in_one_piece(kernel), seconds))
    return experts * used / duration


def _gated(wide: torch.Tensor) -> torch.Tensor:
    """[n, 2I] -> [n, I]"""
    gate, value = wide.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * value


def measure_link() -> float:
    """Bytes per second from page-locked host memory to the GPU."""
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8).pin_memory()
    device = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    return _LINK_BYTES / _best(copy, 0.5)


def measure_device_memory() -> float:
    """Bytes per second of reading the GPU's memory."""
    words = torch.zeros(2**30 // 8, dtype=torch.int64, device="cuda")

    def read() -> None:
        words.sum()
        torch.cuda.synchronize()

    return 2**30 / _best(read, 0.5)


def measure_arithmetic(device: torch.device) -> float:
    """Operations per second of a product of many rows in bf16: what bounds a prompt. Takes 0.1 s."""
    rows, matrix = (torch.ones(size, 1024, dtype=torch.bfloat16, device=device) for size in (256, 1024))

    def multiply() -> None:
        product = torch.nn.functional.linear(rows, matrix)
        product[0, 0].item()  # on a GPU: wait for it

    return 2 * 256 * 1024 * 1024 / _best(multiply, 0.1)


def layer_seconds(hidden: int) -> float:
    """What a decoder layer takes a CPU beside moving its bytes."""
    return _LAYER_SECONDS + _WIDTH_SECONDS * hidden / 1024


def expert_rate(expert_bytes: int) -> float:
    """Stored weight bytes of one expert computed for one token, per second: `smoe doctor`'s, else a quick look."""
    profile = load_profile()
    return measure_experts(expert_bytes, 0.1) if profile is None else profile.expert_bytes_per_second


def this_machine(rates: Rates, device: torch.device) -> DeviceProfile | None:
    """This machine as a profile, by its measured rates and the constants of machines that were measured (docs/log.md);
    None where nobody knows how fast experts come in."""
    is_cpu = device.type == "cpu"
    brings_in = rates.disk if is_cpu else rates.link
    if brings_in is None:
        return None
    host = rates.memory if is_cpu else measure_memory(0.2)
    return DeviceProfile(
        name="this machine",
        source=rates.source,
        link_bytes_per_second=brings_in,
        link_latency_seconds=_READ_SECONDS if is_cpu else _COPY_SECONDS,
        device_bytes_per_second=rates.memory,
        device_flops=measure_arithmetic(device),
        device_expert_seconds=_CPU_EXPERT_SECONDS if is_cpu else _LAUNCH_SECONDS,
        device_layer_seconds=_LAYER_SECONDS if is_cpu else _LAUNCHES_SECONDS,
        host_bytes_per_second=host,
        host_flops=measure_arithmetic(torch.device("cpu")),
        host_expert_seconds=_HAND_OVER_SECONDS,
        date=datetime.now(timezone.utc).date().isoformat(),
        figures=MEASURED,
        disk_bytes_per_second=rates.disk,
        host_memory_bytes=float(psutil.virtual_memory().total),
        has_link=not is_cpu,
    )


def quick_rates(device: torch.device, memory: torch.Tensor | None = None) -> Rates:
    """The stored profile, else a measurement of the memory alone in 0.2 s, on `memory` if it is given."""
    profile = load_profile()
    if profile is not None:
        return profile.rates(device)
    if device.type == "cuda":
        return Rates(measure_device_memory(), None, measure_link(), "a quick measurement")
    return Rates(measure_memory(0.2, memory), None, None, "a quick measurement")


def _best(action: Callable[[], Any], seconds: float) -> float:
    """The shortest of as many runs as fit the time, after one for warming up."""
    action()
    best, started = float("inf"), perf_counter()
    while perf_counter() - started < seconds or best == float("inf"):
        before = perf_counter()
        action()
        best = min(best, perf_counter() - before)
    return best
