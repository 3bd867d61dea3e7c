"""Finds the rates of the machine of a forecast: those of a named profile, or quickly measured rates of this machine."""

from __future__ import annotations

from dataclasses import replace

from smoe.config import EngineConfig
from smoe.errors import SmoeError
from smoe.load.host_slots import reads_directly
from smoe.load.ledger import open_store
from smoe.machine.available_memory import free_device_bytes
from smoe.machine.device import AnyDevice
from smoe.machine.disk_rates import measure_reads
from smoe.machine.floor import Rates
from smoe.machine.measure import emulated_rates, load_profile, quick_rates
from smoe.machine.quick_look import quick_look
from smoe.machine.this_machine import expert_rate, layer_seconds, this_machine
from smoe.memory.emulation import DeviceProfile
from smoe.memory.store import ExpertStore
from smoe.models.described import Described
from smoe.models.spec import ModelSpec
from smoe.policy.budget import Ledger
from smoe.report.pace import UNKNOWN, Access, Pace, RunArithmetic, pace_of

READING_SECONDS = 0.5
"""How many seconds experts of the model are read, to measure the disk."""
_COPIED = 6
"""The factor by which a copy from the page cache is slower than a plain read of memory, if each copy needs one system
call."""
_COPY_SECONDS = 30e-6
"""The seconds of one such system call that do not depend on its size, and of passing the copy to another thread."""


def rates_for(
    device: AnyDevice, expert_bytes: int, profile: DeviceProfile | None, store: ExpertStore | None = None
) -> Rates:
    """Return the machine's rates: those of `profile`, or those stored by `smoe doctor`, or quickly measured ones.
    `store`: the model's files, if they are read past the page cache; the disk rate is then measured by reading these
    files."""
    if profile is not None:
        return emulated_rates(profile)
    if load_profile() is None and device.type == "cpu":
        look = quick_look(expert_bytes)
        rates = Rates(look.memory, look.disk, None, "a quick measurement")
    else:
        rates = quick_rates(device)
    if store is not None:
        return replace(rates, disk=measure_reads(store, READING_SECONDS))
    return rates if rates.disk is not None else replace(rates, disk=quick_look(expert_bytes).disk)


def reads_past_cache(config: EngineConfig, spec: ModelSpec, ledger: Ledger, device: AnyDevice) -> bool:
    """Return whether loads read from the disk. If the RAM that the model leaves free holds all experts, loads are
    copies from the page cache instead."""
    experts_bytes = spec.experts_bytes + (0 if spec.low is None else spec.low.experts_bytes)
    return reads_directly(config, experts_bytes, free_device_bytes(device)[0] - ledger.total_bytes)


def files_of(checkpoint: Described, spec: ModelSpec, device: AnyDevice) -> ExpertStore | None:
    """Return the experts' positions in the files on this machine; None if the files are missing, or must be packed
    first."""
    if not checkpoint.has_weights():
        return None
    try:
        return open_store(checkpoint, spec, checkpoint.experts(spec), device)
    except SmoeError:
        return None


def machine_for(
    rates: Rates, device: AnyDevice, profile: DeviceProfile | None, is_direct: bool, spec: ModelSpec
) -> DeviceProfile | None:
    """Return the machine to simulate: the named profile, or this machine. None if the rate of loading experts is
    unknown."""
    machine = this_machine(rates, device, spec.expert_bytes) if profile is None else profile
    if machine is None or profile is not None or device.type != "cpu":
        return machine
    computed = expert_rate(spec.expert_bytes)
    layer = layer_seconds(int(spec.config.get_text_config().hidden_size))
    machine = replace(machine, device_bytes_per_second=computed, device_layer_seconds=layer)
    if is_direct:
        return machine
    copied = rates.memory / _COPIED
    return replace(
        machine, link_bytes_per_second=copied, link_latency_seconds=_COPY_SECONDS, disk_bytes_per_second=copied
    )


def pace_for(
    checkpoint: Described, device: AnyDevice, is_emulated: bool, arithmetic: RunArithmetic, access: Access
) -> Pace:
    """Return the times that earlier runs of the model have measured. They are unknown for a GPU or an emulated
    device."""
    if device.type != "cpu" or is_emulated:
        return UNKNOWN
    return pace_of(checkpoint.place, arithmetic, access)
