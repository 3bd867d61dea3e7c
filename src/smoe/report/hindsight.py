"""Forecast beside measurement, for a run that has just ended; what it has shown is kept for the next forecast."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.generation.generate import Generation
from smoe.load.assembly import predictor_name
from smoe.load.known import known_of
from smoe.machine.disk_rates import measure_reads
from smoe.machine.measure import quick_rates
from smoe.models.checkpoint import checkpoint_at
from smoe.models.read_spec import read_spec
from smoe.models.spec import ModelSpec
from smoe.report.forecast import dense_bytes_read
from smoe.report.machine_for import READING_SECONDS, machine_for, pace_for
from smoe.report.on_clock import Scene, Simulated, settled, simulate, work_of
from smoe.report.pace import LEAST_STEPS, Pace, measured_pace, remember
from smoe.runtime.engine import Engine
from smoe.simulator.synthetic import TYPICAL

_LONGEST_PROMPT = 512
"""That is simulated; beyond it a prompt's time grows with its length."""
_CPU = torch.device("cpu")


class Foretold(NamedTuple):
    """What `smoe plan` would have said of a run, from what was known before it."""

    seconds_per_token: float
    ttft_seconds: float
    is_calibrated: bool
    """By an earlier run of this model on this machine, not by the machine's rates alone."""


def look_back(model: PreTrainedModel, generation: Generation, place: Path) -> Foretold | None:
    """Foretell a run that has just ended, then learn from it for the next one.

    `place` holds the model. Takes half a second, and one more to look at a disk that no run has shown. None for what is
    not foretold: several sequences, a device other than the CPU, a run of fewer than `LEAST_STEPS` steps or interrupted
    before them.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    steps = generation.decode_counters.forward_passes
    if model.device.type != "cpu" or engine.pacing.is_emulated or len(generation.answers) > 1 or steps < LEAST_STEPS:
        return None
    spec = read_spec(str(place), engine.config)
    is_direct = engine.config.direct_io == "on"  # settled when the model was loaded
    pace = pace_for(checkpoint_at(place), _CPU, is_direct, False, spec.precision)
    run = _simulated(engine, spec, place, pace, generation.prompt_tokens, is_direct)
    if run is None:
        return None
    shown = measured_pace(generation.decode_counters, len(spec.sites))
    with suppress(OSError):  # nothing depends on it
        remember(place, spec.precision, is_direct, replace(shown, prompt=pace.prompt * _prompt_ratio(generation, run)))
    return Foretold(run.seconds_per_token, run.ttft_seconds, pace.layer is not None)


def _simulated(
    engine: Engine, spec: ModelSpec, place: Path, pace: Pace, prompt_tokens: int, is_direct: bool
) -> Simulated | None:
    rates = quick_rates(_CPU)
    if is_direct and pace.load is None:
        rates = replace(rates, disk=measure_reads(engine.store, READING_SECONDS))
    elif rates.disk is None:  # nobody asks for it: loads are copies, or known
        rates = replace(rates, disk=rates.memory)
    machine = machine_for(rates, _CPU, None, is_direct, spec)
    if machine is None:
        return None
    known = known_of(engine.config, place, engine.ledger.resident_share)
    scene = Scene(
        work_of(spec, dense_bytes_read(spec)),
        machine,
        engine.ledger,
        engine.config,
        predictor_name(spec, engine.config, _CPU),
        known.prices,
        pace=pace,
        prompt_tokens=min(prompt_tokens, _LONGEST_PROMPT),
    )
    return simulate(settled(scene), TYPICAL)


def _prompt_ratio(generation: Generation, run: Simulated) -> float:
    """Measured over foretold, of a prompt's computing."""
    of_prompt = generation.counters - generation.decode_counters
    return (of_prompt.compute_seconds + of_prompt.dense_seconds) / run.prefill_parts["computing"]
