"""The times of a step's operations in simulations, from a machine's rates or from earlier runs of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from smoe.memory.emulation import DeviceProfile
from smoe.memory.expert_files import CHUNK_BYTES
from smoe.models.spec import ModelSpec
from smoe.report.pace import ALONE, UNKNOWN, Pace, crowded
from smoe.simulator.virtual_clock import StepTimes

_DECIDING_SECONDS = 1e-4
"""Seconds of smoe's Python code in each layer, during which a device waits (docs/log/forecasts.md). On a CPU
`layer_seconds` includes them."""
_PROMPT_EXPERT_SECONDS = 60e-6
"""Additional seconds for an expert of a prompt on a CPU, because it takes several of the library's matrix products.
This number is a guess, not measured."""
_UNPACKING = 1.25
"""The factor by which quantized experts are computed at fewer bytes per second than bf16 experts, on a CPU."""
_IN_CHUNKS = 1.2
"""The factor by which a prefetch from a disk, which is read in chunks, takes longer than a load in one piece
(`memory/expert_files.py`)."""
_LEAST_READING = 0.05
"""If experts are read during more than this fraction of the time, reads slow down computing."""
_HOST_TIER_SHARE = 0.8
"""The largest fraction of a machine's RAM that the host tier takes."""


@dataclass(frozen=True)
class Work:
    """The sizes of a model's layers and experts, from which its times on a machine are computed."""

    layers: int
    """L, the layers with routed experts."""
    experts: int
    """E, the experts of a layer."""
    top_k: int
    """K, the experts chosen for a token."""
    expert_bytes: int
    """Bytes of an expert as stored."""
    plain_bytes: int
    """Bytes of an expert with two bytes for each weight. This is also the number of arithmetic operations of the expert
    for a token."""
    low_bytes: int
    """Bytes of a low-precision copy; 0: there are none."""
    experts_bytes: int
    layer_bytes: float
    """Bytes of non-expert weights for each layer with experts."""
    decoder_layers: float
    """The number of decoder layers for each layer with experts: 1, or slightly more if some layers have no experts."""

    @property
    def is_quantised(self) -> bool:
        return self.expert_bytes < 0.75 * self.plain_bytes


def work_of(spec: ModelSpec, dense_bytes: int) -> Work:
    """Return the sizes of a model, from its configuration. `dense_bytes`: bytes that a step reads in addition to the
    experts. If layers differ, the largest size is used for all."""
    layers = len(spec.sites)
    elements = max(sum(_elements(part.shape) for part in site.parts) for site in spec.sites)
    return Work(
        layers=layers,
        experts=max(site.experts for site in spec.sites),
        top_k=max(spec.anatomy.top_k.values()),
        expert_bytes=spec.expert_bytes,
        plain_bytes=2 * elements,
        low_bytes=0 if spec.low is None else spec.low.expert_bytes,
        experts_bytes=spec.experts_bytes,
        layer_bytes=dense_bytes / layers,
        decoder_layers=int(spec.config.get_text_config().num_hidden_layers) / layers,
    )


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def times_for(
    machine: DeviceProfile,
    work: Work,
    host_bytes: int | None = None,
    faster_reads: float = 1.0,
    pace: Pace = UNKNOWN,
) -> StepTimes:
    """Return the times of loads, experts, layers and planning, from the machine's rates or, if known, from earlier runs
    (`pace`).

    `host_bytes`: the size of the host tier (None: the usual fraction of the machine's RAM); other experts come from the
    disk first. `faster_reads`: a factor for the rates of the machine's disk and link.
    """
    in_host = _share_in_host(machine, work, host_bytes)
    slower = _UNPACKING if work.is_quantised else 1.0
    of_prompts = 1.0 if pace.prompt is None else pace.prompt

    def load(nbytes: int) -> float:
        if pace.load is not None:
            return pace.load * nbytes / work.expert_bytes / faster_reads
        seconds = machine.link_seconds(nbytes)
        if machine.disk_bytes_per_second is not None:
            seconds += (1 - in_host) * nbytes / machine.disk_bytes_per_second
        return seconds / faster_reads

    @cache
    def expert(rows: int) -> float:
        if rows == 1 and pace.expert is not None:
            return pace.expert
        by_memory = slower * work.expert_bytes / machine.device_bytes_per_second
        of_a_prompt = _PROMPT_EXPERT_SECONDS if rows > 1 and not machine.has_link else 0.0
        by_arithmetic = work.plain_bytes * rows / machine.device_flops
        seconds = machine.device_expert_seconds + of_a_prompt + max(by_memory, by_arithmetic)
        return seconds if rows == 1 else of_prompts * seconds

    def layer(tokens: int) -> float:
        if tokens == 1 and pace.layer is not None:
            return pace.layer
        constant = machine.device_layer_seconds * (work.decoder_layers - 1)
        seconds = constant + machine.layer_seconds(work.layer_bytes, tokens)
        return seconds if tokens == 1 else of_prompts * seconds

    def host(rows: int) -> float:
        by_memory = slower * work.expert_bytes / machine.host_bytes_per_second
        return machine.host_expert_seconds + max(by_memory, work.plain_bytes * rows / machine.host_flops)

    return StepTimes(
        load=load(work.expert_bytes),
        expert=expert,
        layer=layer,
        host=host if machine.has_link else None,
        deciding=_DECIDING_SECONDS if machine.has_link else 0.0,
        asking=machine.device_expert_seconds,
        low_load=load(work.low_bytes) if work.low_bytes else 0.0,
        in_chunks=1.0 if machine.has_link or work.expert_bytes <= CHUNK_BYTES else _IN_CHUNKS,
        alone=1.0 if machine.has_link else ALONE,
        first_load=_first_load(pace, load(work.expert_bytes) * faster_reads, faster_reads),
    )


def _first_load(pace: Pace, reading: float, faster_reads: float) -> float | None:
    """Return the time of a load into memory that is used for the first time, with reads that are `faster_reads` times
    as fast: only the time of reading, `reading` seconds, is divided. None if it was not measured."""
    if pace.first_load is None:
        return None
    return pace.first_load - min(pace.first_load, reading) * (1 - 1 / faster_reads)


def _share_in_host(machine: DeviceProfile, work: Work, host_bytes: int | None) -> float:
    """Return the fraction of the experts that a load finds in the host tier; 1 if the machine has no host tier."""
    if not machine.has_link:
        return 1.0
    if host_bytes is None and machine.host_memory_bytes is None:
        return 1.0
    room = _HOST_TIER_SHARE * (machine.host_memory_bytes or 0.0) if host_bytes is None else host_bytes
    return min(1.0, room / work.experts_bytes)


def of_first_loads(times: StepTimes) -> StepTimes:
    """Return the times of steps that load experts into memory that the process uses for the first time."""
    return times if times.first_load is None else replace(times, load=times.first_load)


def in_a_crowd(times: StepTimes, reading: float) -> StepTimes:
    """Return the times with slower layers in decode steps, because reads run during the fraction `reading` of the time
    and occupy the same cores. Prompts, with few large products, are not slowed."""
    if reading <= _LEAST_READING:
        return times
    slower = crowded(reading)
    return replace(times, layer=lambda tokens: times.layer(tokens) * (slower if tokens == 1 else 1.0))
