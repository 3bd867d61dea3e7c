"""Compares a finished run with its forecast, and stores what the run has measured for the next forecast."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.generation.generate import Generation
from smoe.generation.loop import UNSETTLED_STEPS
from smoe.load.learned import predictor_name
from smoe.load.tuned_settings import known_of
from smoe.machine.disk_rates import measure_reads
from smoe.machine.measure import quick_rates
from smoe.metrics import Counters
from smoe.models.checkpoint import checkpoint_at
from smoe.models.read_spec import read_spec
from smoe.models.spec import ModelSpec
from smoe.policy.registry import eviction_kind, make_eviction_for
from smoe.policy.residency import PoolSize
from smoe.report.machine_for import READING_SECONDS, machine_for, pace_for
from smoe.report.on_clock import FIRST_TOKENS, MOST_LAYERS, Scene, Simulated, settled
from smoe.report.pace import (
    LEAST_BEGINNING,
    LEAST_STEPS,
    UNKNOWN,
    Access,
    LastRun,
    Pace,
    access_of,
    arithmetic_of,
    first_load,
    is_forecast,
    measured_pace,
    of_prompt,
    remember,
    usable,
)
from smoe.report.prompt_layers import PromptLayers
from smoe.report.step_times import work_of
from smoe.runtime.engine import Engine
from smoe.simulator.skewness import skew_of
from smoe.simulator.synthetic import TYPICAL, DrawnShape

_LONGEST_PROMPT = 512
"""The number of tokens of the longest prompt that is simulated. The time of a longer prompt is the simulated time
scaled by its length."""
_LONGEST_LOOK = 64
"""The maximum number of decode steps in which a run's routing is compared with typical routing."""
_CPU = torch.device("cpu")


class Foretold(NamedTuple):
    """The forecast that `smoe plan` would have made for a run, from the measurements known before the run."""

    seconds_per_token: float
    ttft_seconds: float
    is_calibrated: bool
    """Whether the forecast used measurements of earlier runs of this model on this machine, not only the machine's
    rates."""


def _is_forecast(model: PreTrainedModel, generation: Generation) -> bool:
    """Return whether a forecast can be made for a run. It cannot for several sequences, a cluster, a draft model, a
    device other than the CPU, or too few steps."""
    engine: Engine = model.offload  # type: ignore[assignment]
    steps = generation.decode_counters.forward_passes
    return is_forecast(engine) and len(generation.answers) == 1 and steps >= UNSETTLED_STEPS + LEAST_STEPS


def look_back(model: PreTrainedModel, generation: Generation, place: Path, layers: PromptLayers) -> Foretold | None:
    """Return the forecast of a finished run. Then store the run's measurements for the next forecast.

    `place`: the model's path; `layers` has observed the run. This takes a second or two, and one more to measure an
    unknown disk. Return None for a run that is not forecast: several sequences, a cluster, a draft model, a device
    other than the CPU, or too few decode steps.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    if not _is_forecast(model, generation):
        return None
    spec = read_spec(str(place), engine.config)
    is_direct = engine.config.direct_io == "on"  # settled when the model was loaded
    access, arithmetic = access_of(engine.ledger, is_direct), arithmetic_of(engine.config, spec.precision)
    pace = pace_for(checkpoint_at(place), _CPU, False, arithmetic, access)
    run = _simulated(engine, spec, place, pace, generation.prompt_tokens, is_direct)
    if run is None:
        return None
    longer = max(1.0, generation.prompt_tokens / _LONGEST_PROMPT)  # than what is simulated: in so many pieces
    first = run.ttft_seconds * longer + (pace.first_pass or 0.0)
    found = Foretold(run.seconds_per_token, first, pace.expert is not None)
    shown = shown_by(engine, generation.later_counters, generation.decode_counters, generation.prompt_tokens)
    shown = shown.after(_prompt_shown(generation, run, pace, layers))
    shown = replace(shown, beginning=_beginning_shown(generation, run, pace, access))
    if layers.is_of_first_pass:
        of_prompt = generation.counters - generation.decode_counters
        shown = replace(shown, first_load=first_load(of_prompt, engine.store.expert_bytes))
    if engine.config.has_low:  # the mean time of full and low-precision copies is the time of neither
        return found
    with suppress(OSError):  # the result does not depend on it
        remember(place, arithmetic, access, usable(shown, access), _beside(generation, found))
    return found


def _beginning_shown(generation: Generation, run: Simulated, pace: Pace, access: Access) -> float | None:
    """Return the seconds by which the first decode steps took longer than later ones, without those that the simulation
    explains. None for too few steps, and for experts in memory, whose forecast adds simulated reads only."""
    steady, steps = generation.later_seconds_per_token, generation.step_seconds[:UNSETTLED_STEPS]
    if steady is None or access is Access.NONE:
        return None
    simulated = run.beginning_seconds - (pace.beginning or 0.0) - (FIRST_TOKENS - 1) * run.seconds_per_token
    return max(LEAST_BEGINNING, sum(steps) - len(steps) * steady - max(0.0, simulated))


def _beside(generation: Generation, found: Foretold) -> LastRun | None:
    """Return the comparison of a run with its forecast; None if the run has no measured times."""
    per_token, first_token = generation.later_seconds_per_token, generation.ttft_seconds
    if not per_token or not first_token:
        return None
    return LastRun(per_token / found.seconds_per_token, first_token / found.ttft_seconds, generation.waited_share)


def shown_by(engine: Engine, later: Counters, decode: Counters, prompt_tokens: int) -> Pace:
    """Return the times and the skew of routing (how unevenly experts are used), computed from the counters of one
    sequence's decode steps: the times from those of `later` steps, the skew from those of all steps, `decode`. Return
    an empty `Pace` for too few steps."""
    pace = measured_pace(later, len(engine.store.layers), engine.store.expert_bytes)
    return pace if pace == UNKNOWN else replace(pace, skew=_skew_shown(engine, decode, prompt_tokens))


def _skew_shown(engine: Engine, decode: Counters, prompt_tokens: int) -> float | None:
    """Return how unevenly the routing uses experts. None if the chosen or resident experts did not depend on the
    routers alone."""
    config, ledger, of_layers = engine.config, engine.ledger, engine.store.layers
    if config.alpha > 0 or config.has_low or config.prices_answers or eviction_kind(config.eviction).learned:
        return None
    layers = min(len(of_layers), MOST_LAYERS)
    experts = max(layer.experts for layer in of_layers.values())
    steps, tokens = min(decode.forward_passes, _LONGEST_LOOK), min(prompt_tokens, _LONGEST_PROMPT)
    shape = DrawnShape(experts, ledger.demand.top_k, layers, steps, tokens)
    slots = max(shape.top_k, round(ledger.slots_of_text(prompt_tokens + steps) * layers / len(of_layers)))
    wanted = dict.fromkeys(range(layers), experts)
    eviction = partial(make_eviction_for, engine.eviction_settings, [PoolSize(slots, 0)], wanted)
    found_there = (decode.decode_hits - decode.prefetches_used) / decode.decode_uses
    return skew_of(found_there, shape, TYPICAL, slots, ledger.pools[0].staging, eviction)


def _simulated(
    engine: Engine, spec: ModelSpec, place: Path, pace: Pace, prompt_tokens: int, is_direct: bool
) -> Simulated | None:
    rates = quick_rates(_CPU, engine.slot_memory)  # measured on the slots: other memory would exceed the budget
    if is_direct and pace.load is None:
        rates = replace(rates, disk=measure_reads(engine.store, READING_SECONDS))
    elif rates.disk is None:  # not used: loads are copies, or their time is known
        rates = replace(rates, disk=rates.memory)
    machine = machine_for(rates, _CPU, None, is_direct, spec)
    if machine is None:
        return None
    known = known_of(engine.config, place, engine.ledger.resident_share)
    scene = Scene(
        work_of(spec, spec.dense_bytes_read),
        machine,
        engine.ledger,
        engine.config,
        predictor_name(spec, engine.config, _CPU),
        known.prices,
        pace=pace,
        prompt_tokens=min(prompt_tokens, _LONGEST_PROMPT),
    )
    return settled(scene)[1]


def _prompt_shown(generation: Generation, run: Simulated, pace: Pace, layers: PromptLayers) -> Pace:
    """Return the measured time of computing prompts, from the first pass of a process. Return an empty `Pace` if the
    prompt is longer than simulated prompts."""
    measured, warm = generation.counters - generation.decode_counters, layers.warm_seconds
    tokens = generation.prompt_tokens - generation.reused_tokens
    if warm is None or measured.forward_passes != 1 or tokens > _LONGEST_PROMPT:
        return UNKNOWN
    by_rates = run.prefill_parts["computing"] / (pace.prompt or 1.0)
    return of_prompt(measured.compute_seconds + measured.dense_seconds, warm, by_rates, tokens, pace.prompt)
