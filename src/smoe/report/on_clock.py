"""Simulates a run: the engine's own plans on a virtual clock, on a machine described by its rates.

    spec (sizes) + profile (rates) -> StepTimes --+
    habits of recorded runs -> synthetic trace ---+-> virtual clock, policies of the configuration -> TTFT, TPOT

At most `MOST_LAYERS` layers are simulated, with their share of the slots, after a prompt that fills the cache; times
are then scaled to all layers. There is one sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import NamedTuple

from smoe.bounds import DEFAULT_PREFETCH_DEPTH
from smoe.config import EngineConfig
from smoe.expert import LOW
from smoe.memory.emulation import DeviceProfile
from smoe.memory.expert_files import CHUNK_BYTES
from smoe.models.spec import ModelSpec
from smoe.policy.answering import Answering
from smoe.policy.budget import Ledger
from smoe.policy.importance import ALL_IMPORTANT
from smoe.policy.prediction import ASKED, Grading, Prediction, Predictor
from smoe.policy.prices import PriceTable
from smoe.policy.quality_budget import QualityBudget, TimeBudget, nats_of_perplexity
from smoe.policy.registry import make_eviction_for, predictor_kind
from smoe.policy.residency import PoolSize
from smoe.report.pace import ALONE, UNKNOWN, Pace, crowded
from smoe.routing import Phase, Routing
from smoe.runtime.substitution import substitution_of
from smoe.simulator.foresight import Foresight, Recorded, blurred
from smoe.simulator.synthetic import TYPICAL, DrawnShape, Habits, synthesise
from smoe.simulator.virtual_clock import StepTimes, Timed, VirtualClock

PROMPT_TOKENS = 128
"""The number of prompt tokens for which the time to the first token (TTFT) is stated: the longer prompt of the
papers."""
_WARM_UP, _STEPS = 16, 32
"""The numbers of simulated decode steps: warm-up steps that do not count, then counted ones."""
COMPARED_STEPS = 16
"""The number of counted decode steps in simulations that compare budgets and presets. Speeds from so few steps differ
from those of all steps by 1 % in the mean, and 7 % at most."""
_LOOK_STEPS = 8
"""The number of last warm-up steps in which the simulation measures how much of the time experts are read. Reads slow
down concurrent computing."""
MOST_LAYERS, COMPARED_LAYERS = 12, 6
"""The largest number of simulated layers: of a forecast, and of simulations that compare budgets and presets. Speeds of
6 layers differ from those of 12 by 2 % in the mean, and 6 % at most (docs/log/forecasts.md)."""
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
    )


def _share_in_host(machine: DeviceProfile, work: Work, host_bytes: int | None) -> float:
    """Return the fraction of the experts that a load finds in the host tier; 1 if the machine has no host tier."""
    if not machine.has_link:
        return 1.0
    if host_bytes is None and machine.host_memory_bytes is None:
        return 1.0
    room = _HOST_TIER_SHARE * (machine.host_memory_bytes or 0.0) if host_bytes is None else host_bytes
    return min(1.0, room / work.experts_bytes)


@dataclass(frozen=True)
class Simulated:
    """The speed and the times that the simulation of a run has given."""

    seconds_per_token: float
    ttft_seconds: float
    """Seconds to the first token of the scene's prompt, with an empty cache."""
    parts: dict[str, float]
    """{activity: seconds} of a token; the sum is `seconds_per_token`."""
    prefill_parts: dict[str, float]
    """{activity: seconds} of a prompt; in reality the activities overlap."""
    pieces: dict[str, float]
    """{operation: seconds} of a load, an expert (the mean for a token), a layer without its experts, and planning in a
    layer."""
    hit_ratio: float
    prefetches: bool

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds_per_token

    @property
    def bound_by(self) -> str:
        """The activity in `parts` that takes most of a token's time."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def prefill_bound_by(self) -> str:
        return max(self.prefill_parts, key=self.prefill_parts.__getitem__)


@dataclass(frozen=True)
class Scene:
    """The input of a simulation, except the statistics of the routing: a model, a machine, a memory budget and
    settings."""

    work: Work
    machine: DeviceProfile
    ledger: Ledger
    config: EngineConfig
    """The settings, in which every `auto` is already replaced by a choice (`load/tuned_settings.py`)."""
    predictor: str
    """The name of the predictor used in decode (`load/learned.py`)."""
    prices: PriceTable | None = None
    """The quality costs, if misses are resolved within a limit of quality or time."""
    faster_reads: float = 1.0
    pace: Pace = UNKNOWN
    """The times that earlier runs of this model have measured."""
    prompt_tokens: int = PROMPT_TOKENS
    is_compared: bool = False
    """Whether the simulation only compares budgets or presets, so that fewer layers and steps are sufficient."""

    @property
    def layers(self) -> int:
        """The number of simulated layers."""
        return min(self.work.layers, COMPARED_LAYERS if self.is_compared else MOST_LAYERS)

    @property
    def steps(self) -> int:
        """The number of counted decode steps."""
        return COMPARED_STEPS if self.is_compared else _STEPS


def settled(scene: Scene) -> tuple[Scene, Simulated]:
    """Return the scene and its simulation with typical routing. If prefetching makes the simulated run slower and the
    engine may switch it off, it is switched off in the returned scene."""
    without = replace(scene, predictor="none")
    begun = _begin(scene, TYPICAL)
    if begun.is_all_resident:  # nothing is left to prefetch
        scene = scene if scene.config.prefetch != "auto" else without
        return scene, _finish(scene, begun)
    if scene.predictor == "none" or scene.config.prefetch != "auto":
        return scene, _finish(scene, begun)
    runs = ((each, _finish(each, begun)) for each in (scene, without))
    return min(runs, key=lambda each: each[1].seconds_per_token)


def simulate(scene: Scene, habits: Habits) -> Simulated:
    """Return the simulated times of a prompt and of some decode steps."""
    return _finish(scene, _begin(scene, habits))


class _Begun(NamedTuple):
    """A simulated run after its prompt and its first warm-up steps. Nothing has been prefetched so far, so that runs
    with and without prefetching share this part."""

    clock: VirtualClock
    times: StepTimes
    drawn: Drawn
    served: int
    """The number of routings of the trace that the clock has served."""
    is_all_resident: bool
    """Whether every expert has a slot. Decode steps then load nothing once all experts have been loaded."""


def _begin(scene: Scene, habits: Habits) -> _Begun:
    work, config = scene.work, scene.config
    times = times_for(scene.machine, work, config.host_memory_bytes, scene.faster_reads, scene.pace)
    layers = scene.layers
    if scene.pace.skew is not None:
        habits = replace(habits, skew=scene.pace.skew * habits.skew)
    drawn = Drawn(DrawnShape(work.experts, work.top_k, layers, _WARM_UP + _STEPS, scene.prompt_tokens), habits)
    clock, is_all_resident = _clock(scene, times, layers), scene.ledger.cache_slots >= work.layers * work.experts
    served = layers * (1 + (0 if is_all_resident else max(0, _WARM_UP - _LOOK_STEPS)))
    for routing in drawn.trace[:served]:
        clock.serve(routing)
    return _Begun(clock, times, drawn, served, is_all_resident)


def _finish(scene: Scene, begun: _Begun) -> Simulated:
    """Return the simulated times of a run that has begun. The run is not changed, so others can start from it too."""
    work, layers, steps = scene.work, begun.drawn.shape.layers, scene.steps
    scale, prefill_seconds = work.layers / layers, begun.clock.result.prefill_seconds
    if begun.is_all_resident:
        times, uses, loads, alone, weighed = begun.times, steps * layers * work.top_k, 0, 0, 0.0
        by_device = weighed = float(uses)
        seconds = work.layers * (times.layer(1) + times.deciding + work.top_k * times.expert(1))
    else:
        timed, before, times = _served(scene, begun, steps)
        seconds = scale * sum(timed.step_seconds[_WARM_UP:]) / steps
        uses, loads = timed.uses - before.uses, timed.loads - before.loads
        by_device = uses - timed.computed_by_host * steps / (steps + _WARM_UP)
        alone = timed.computed_alone - before.computed_alone
        weighed = by_device + (times.alone - 1) * alone
    return Simulated(
        seconds,
        scale * prefill_seconds,
        _parts(scene, times, seconds, scale * weighed / steps),
        _prefill_parts(scene, times, begun.drawn, layers),
        {
            "load": times.load,
            "expert": times.expert(1) * (weighed / by_device if by_device > 0 else 1.0),
            "layer": times.layer(1),
            "deciding": times.deciding,
        },
        1 - loads / uses if uses else 1.0,
        scene.predictor != "none",
    )


def prompt_seconds(scene: Scene, tokens: int) -> float:
    """Return the seconds of a prompt that is so long that its tokens choose all experts, with an empty cache. The
    prompt is computed in pieces: the first piece reads all experts, later pieces those without a slot, and reads
    overlap with computing."""
    work, config = scene.work, scene.config
    times = times_for(scene.machine, work, config.host_memory_bytes, scene.faster_reads, scene.pace)
    missing = max(0.0, work.experts - scene.ledger.cache_slots / work.layers)
    seconds = 0.0
    for first in range(0, tokens, config.prefill_tokens):
        piece = min(config.prefill_tokens, tokens - first)
        rows = max(1, round(piece * work.top_k / work.experts))
        computing = times.layer(piece) + work.experts * times.expert(rows)
        seconds += work.layers * max(computing, (missing if first else work.experts) * times.load)
    return seconds


def _served(scene: Scene, begun: _Begun, steps: int) -> tuple[Timed, Timed, StepTimes]:
    """Run the remaining steps of a run. Return (the counts of all steps, the counts before the counted steps, the times
    of operations in the counted steps). On a CPU, reads slow down layers, as measured in the last warm-up steps."""
    trace, times, layers = begun.drawn.trace, begun.times, begun.drawn.shape.layers
    clock = begun.clock.fork(_predictor(scene, begun.drawn, begun.served))
    unseen = replace(clock.result, step_seconds=[*clock.result.step_seconds])
    first = layers * (1 + _WARM_UP)
    for routing in trace[begun.served : first]:
        clock.serve(routing)
    if not scene.machine.has_link:
        times = _in_a_crowd(times, _reading(clock.result, unseen))
        clock.change_times(times)
    before = replace(clock.result, step_seconds=[])
    for routing in trace[first : first + layers * steps]:
        clock.serve(routing)
    return clock.result, before, times


def _reading(timed: Timed, before: Timed) -> float:
    """Return the fraction of the time since the snapshot `before` in which at least one read was running."""
    seconds = sum(timed.step_seconds[len(before.step_seconds) :])
    return (timed.link_seconds - before.link_seconds) / seconds


def _in_a_crowd(times: StepTimes, reading: float) -> StepTimes:
    """Return the times with slower layers in decode steps, because reads run during the fraction `reading` of the time
    and occupy the same cores. Prompts, with few large products, are not slowed."""
    if reading <= _LEAST_READING:
        return times
    slower = crowded(reading)
    return replace(times, layer=lambda tokens: times.layer(tokens) * (slower if tokens == 1 else 1.0))


class Drawn(NamedTuple):
    """The parameters of a synthetic trace, which is drawn at random. All budgets of a forecast use the same trace."""

    shape: DrawnShape
    habits: Habits

    @property
    def trace(self) -> list[Routing]:
        return _synthesised(self.shape, self.habits)

    def guesses(self, recall: float) -> dict[int, list[int]]:
        """Return {decode step: simulated predictions}, which contain the fraction `recall` of the used experts."""
        return _guessed(self.shape, self.habits, recall)


@cache
def _synthesised(shape: DrawnShape, habits: Habits) -> list[Routing]:
    return synthesise(shape, habits, with_scores=True)


@cache
def _guessed(shape: DrawnShape, habits: Habits, recall: float) -> dict[int, list[int]]:
    return blurred(_synthesised(shape, habits), recall)


def _clock(scene: Scene, times: StepTimes, layers: int) -> VirtualClock:
    """Return a virtual clock that uses the engine's policies, without prefetching. Its number of slots is the fraction
    of all slots that the simulated layers have."""
    work, config, share = scene.work, scene.config, layers / scene.work.layers
    slots = max(work.top_k, round(share * scene.ledger.cache_slots))
    low_slots = max(work.top_k, round(share * scene.ledger.low_slots)) if scene.ledger.low_slots else 0
    sizes = [PoolSize(slots, 0)] + [PoolSize(low_slots, 0, form=LOW)] * (low_slots > 0)
    eviction = make_eviction_for(config.eviction_settings, sizes, dict.fromkeys(range(layers), work.experts))
    balance = {"auto": "optimal" if times.host else None, "none": None}.get(config.balance, config.balance)
    return VirtualClock(
        slots,
        scene.ledger.pools[0].staging,
        layers,
        eviction,
        times,
        substitution_of(config).switches,
        balance if times.host else None,
        low_slots=low_slots,
        answering=_answering(config, scene.prices, layers, times),
    )


def _predictor(scene: Scene, drawn: Drawn, observed: int) -> Predictor | None:
    """Return a simulated predictor that has the typical recall of the configured predictor; None without prefetch. It
    has observed the first `observed` routings of the trace."""
    name, config, trace = scene.predictor, scene.config, drawn.trace
    if name == "none":
        return None
    kind = predictor_kind(name)
    predictor: Predictor
    if kind.names_whole_layers:
        whole = [[Prediction(coming.layer, range(coming.experts))] for coming in [*trace[1:], trace[0]]]
        predictor = Recorded(whole)
    else:
        depth = (config.prefetch_depth or DEFAULT_PREFETCH_DEPTH) if "prefetch_depth" in kind.settings else 1
        asked = kind.asked if config.prefetch_asked is None else ASKED[config.prefetch_asked]
        predictor = Foresight(trace, kind.usual_recall, asked, depth=depth, guesses=drawn.guesses(kind.usual_recall))
        alpha = config.alpha if config.prefetch_what == "top-score" else 0.0
        thresholds = ALL_IMPORTANT if trace[0].weights is None else substitution_of(config).switches.thresholds
        predictor.grade_by(Grading(alpha, thresholds))
    for routing in trace[:observed]:
        predictor.observe(routing)
    return predictor


def _answering(config: EngineConfig, prices: PriceTable | None, layers: int, times: StepTimes) -> Answering | None:
    """Return the object that resolves misses, made as in `load/build.py`, with the quality costs of the simulated
    layers. None if misses are not resolved by quality cost."""
    if prices is None:
        return None
    some = PriceTable({n: prices.layers[layer] for n, layer in enumerate(sorted(prices.layers)[:layers])})
    first_rate = times.load / max(prices.typical, 1e-9)
    share = layers / len(prices.layers)
    if config.tpot_seconds is not None:
        return Answering(some, TimeBudget(share * config.tpot_seconds, first_rate))
    assert config.max_perplexity_increase is not None, "quality costs are read for one of the two budgets"
    return Answering(some, QualityBudget(share * nats_of_perplexity(config.max_perplexity_increase), first_rate))


def _parts(scene: Scene, times: StepTimes, seconds: float, computed: float) -> dict[str, float]:
    """Divide the `seconds` of a token into activities. `computed`: the number of experts that the device computes for
    the token."""
    work, machine = scene.work, scene.machine
    experts, others = computed * times.expert(1), work.layers * times.layer(1)
    constants = computed * machine.device_expert_seconds
    constants += work.layers * machine.device_layer_seconds * work.decoder_layers
    deciding = work.layers * times.deciding
    waited = max(0.0, seconds - experts - others - deciding)
    return {
        "link" if machine.has_link else "disk": waited,
        "memory": experts + others - constants,
        "launches and Python" if machine.has_link else "Python": constants + deciding,
    }


def _prefill_parts(scene: Scene, times: StepTimes, drawn: Drawn, layers: int) -> dict[str, float]:
    prompt, scale = _prompt(drawn.shape, drawn.habits), scene.work.layers / layers
    reading = sum(sum(rows.values()) for rows in prompt) * times.load
    computing = layers * times.layer(drawn.shape.prompt_tokens)
    computing += sum(count * times.expert(rows) for of_layer in prompt for rows, count in of_layer.items())
    return {"link" if scene.machine.has_link else "disk": scale * reading, "computing": scale * computing}


@cache
def _prompt(shape: DrawnShape, habits: Habits) -> list[Counter[int]]:
    """Return, for each layer, {number of prompt tokens: number of experts that so many tokens have chosen}."""
    prompt = _synthesised(shape, habits)[: shape.layers]
    assert all(routing.phase is Phase.PREFILL for routing in prompt), "a prompt comes first"
    return [Counter(Counter(chain.from_iterable(routing.top_k_index)).values()) for routing in prompt]
