"""The machine that a forecast is made for: a profile that was named, or this one, by rates measured in a second."""

from __future__ import annotations

from dataclasses import replace

import torch

from smoe.config import EngineConfig
from smoe.load.tiers import reads_directly
from smoe.machine.available_memory import free_device_bytes
from smoe.machine.floor import Rates
from smoe.machine.measure import emulated_rates, measure_small_disk, quick_rates, this_machine
from smoe.memory.emulation import DeviceProfile
from smoe.models.checkpoint import Checkpoint
from smoe.models.spec import ModelSpec
from smoe.policy.budget import Ledger
from smoe.report.pace import UNKNOWN, Pace, pace_of

_COPIED = 6
"""How much slower than a read of memory a copy from the page cache is, by the kernel and with a call for each."""
_COPY_SECONDS = 30e-6
"""Of such a call, and of handing the copy over."""


def rates_for(device: torch.device, expert_bytes: int, profile: DeviceProfile | None) -> Rates:
    """The profile's, else what `smoe doctor` has measured, else a quick look."""
    if profile is not None:
        return emulated_rates(profile)
    rates = quick_rates(device)
    if rates.disk is not None:
        return rates
    return Rates(rates.memory, measure_small_disk(expert_bytes), rates.link, rates.source)


def reads_past_cache(config: EngineConfig, spec: ModelSpec, ledger: Ledger, device: torch.device) -> bool:
    """Whether loads are reads of the disk; where RAM beside the budget holds the whole model, they are copies from the
    page cache."""
    return reads_directly(config, spec.experts_bytes, free_device_bytes(device)[0] - ledger.budget_bytes)


def machine_for(
    rates: Rates, device: torch.device, profile: DeviceProfile | None, is_direct: bool
) -> DeviceProfile | None:
    """The profile named, else this machine; None where nobody knows how fast experts come in."""
    machine = this_machine(rates, device) if profile is None else profile
    if machine is None or profile is not None or device.type != "cpu" or is_direct:
        return machine
    copied = rates.memory / _COPIED
    return replace(
        machine, link_bytes_per_second=copied, link_latency_seconds=_COPY_SECONDS, disk_bytes_per_second=copied
    )


def pace_for(checkpoint: Checkpoint, device: torch.device, is_direct: bool, is_emulated: bool, precision: str) -> Pace:
    """What earlier runs of the model have shown: on a CPU, whose clock is the run's own."""
    if device.type != "cpu" or is_emulated:
        return UNKNOWN
    return pace_of(checkpoint.place, precision, is_direct)
