"""This machine as a profile, as emulated devices have one, for what is simulated on it."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import psutil

from smoe.machine.device import AnyDevice
from smoe.machine.floor import Rates
from smoe.machine.measure import load_profile
from smoe.machine.quick_look import quick_look
from smoe.memory.emulation import MEASURED, DeviceProfile

_LAYER_SECONDS, _WIDTH_SECONDS = 0.16e-3, 0.09e-3
"""What a decoder layer takes in addition to moving its bytes, on the CPUs that were measured: small operations and
Python (docs/log/forecasts.md); and more for every 1024 numbers of the hidden state."""
_CPU_EXPERT_SECONDS = 10e-6
"""What one expert takes a CPU in addition to moving its bytes, where all of a layer's are computed in one piece."""
_READ_SECONDS = 150e-6
"""From asking for an expert on disk to the first byte of it, and handing the read one over."""
_COPY_SECONDS, _LAUNCH_SECONDS, _LAUNCHES_SECONDS, _HAND_OVER_SECONDS = 20e-6, 40e-6, 300e-6, 50e-6
"""Beside a device: of one copy, of an expert's kernels, of a layer's others, of an expert given to the CPU."""


def layer_seconds(hidden: int) -> float:
    """What a decoder layer takes a CPU in addition to moving its bytes."""
    return _LAYER_SECONDS + _WIDTH_SECONDS * hidden / 1024


def expert_rate(expert_bytes: int) -> float:
    """Stored weight bytes of one expert computed for one token, per second: `smoe doctor`'s, else a quick look."""
    profile = load_profile()
    return quick_look(expert_bytes).experts if profile is None else profile.expert_bytes_per_second


def product_rate(expert_bytes: int) -> float:
    """Operations per second of products of many rows, likewise."""
    profile = load_profile()
    known = None if profile is None else profile.products_per_second
    return quick_look(expert_bytes).products if known is None else known


def this_machine(rates: Rates, device: AnyDevice, expert_bytes: int) -> DeviceProfile | None:
    """This machine as a profile, by its measured rates and the constants of machines that were measured
    (docs/log/forecasts.md); None where the rate at which experts are read is not known."""
    is_cpu = device.type == "cpu"
    brings_in = rates.disk if is_cpu else rates.link
    if brings_in is None:
        return None
    host = rates.memory if is_cpu else quick_look(expert_bytes).memory
    products = product_rate(expert_bytes)
    return DeviceProfile(
        name="this machine",
        source=rates.source,
        link_bytes_per_second=brings_in,
        link_latency_seconds=_READ_SECONDS if is_cpu else _COPY_SECONDS,
        device_bytes_per_second=rates.memory,
        device_flops=products if is_cpu else _gpu_products(device),
        device_expert_seconds=_CPU_EXPERT_SECONDS if is_cpu else _LAUNCH_SECONDS,
        device_layer_seconds=_LAYER_SECONDS if is_cpu else _LAUNCHES_SECONDS,
        host_bytes_per_second=host,
        host_flops=products,
        host_expert_seconds=_HAND_OVER_SECONDS,
        date=datetime.now(timezone.utc).date().isoformat(),
        figures=MEASURED,
        disk_bytes_per_second=rates.disk,
        host_memory_bytes=float(psutil.virtual_memory().total),
        has_link=not is_cpu,
    )


def _gpu_products(device: Any) -> float:
    from smoe.machine.gpu_rates import measure_arithmetic

    return measure_arithmetic(device)
