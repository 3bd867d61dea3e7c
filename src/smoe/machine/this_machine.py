"""Describes this machine by a profile like those of emulated devices, for simulations."""

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
"""The time of a decoder layer on a CPU in addition to moving its bytes (small operations and Python,
docs/log/forecasts.md): a constant, and an addition per 1024 elements of the hidden state. In seconds."""
_CPU_EXPERT_SECONDS = 10e-6
"""The time of one expert on a CPU in addition to moving its bytes, in seconds, if all experts of a layer are computed
in one call."""
_READ_SECONDS = 150e-6
"""The time from requesting an expert on disk until its first byte, in seconds, including the time to report the
finished read."""
_COPY_SECONDS, _LAUNCH_SECONDS, _LAUNCHES_SECONDS, _HAND_OVER_SECONDS = 20e-6, 40e-6, 300e-6, 50e-6
"""With a device, in seconds: the time of one copy, of launching an expert's kernels, of launching a layer's other
kernels, and of passing an expert to the CPU."""


def layer_seconds(hidden: int) -> float:
    """Return the time of a decoder layer on a CPU in addition to moving its bytes, in seconds. `hidden`: the number of
    elements of the hidden state."""
    return _LAYER_SECONDS + _WIDTH_SECONDS * hidden / 1024


def expert_rate(expert_bytes: int) -> float:
    """Return the rate at which one token passes through experts of this size, in bytes of weights per second. It comes
    from `smoe doctor`, else from a quick measurement."""
    profile = load_profile()
    return quick_look(expert_bytes).experts if profile is None else profile.expert_bytes_per_second


def product_rate(expert_bytes: int) -> float:
    """Return the rate of products of many rows, in operations per second. It comes from `smoe doctor`, else from a
    quick measurement."""
    profile = load_profile()
    known = None if profile is None else profile.products_per_second
    return quick_look(expert_bytes).products if known is None else known


def this_machine(rates: Rates, device: AnyDevice, expert_bytes: int) -> DeviceProfile | None:
    """Return a profile of this machine, from its measured rates and from constants that were measured on other machines
    (docs/log/forecasts.md).

    None if the rate of loading experts is unknown.
    """
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
