"""Simulates a run: the engine's own plans on a virtual clock, on a machine described by its rates.

    spec (sizes) + profile (rates) -> StepTimes --+
    habits of recorded runs -> synthetic trace ---+-> virtual clock, policies of the configuration -> TTFT, TPOT

At most `MOST_LAYERS` layers are simulated, with their share of the slots, after a prompt that fills the cache; times
are then scaled to all layers. There is one sequence, whose text is short, so that experts use memory that is reserved
for long texts.
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
from smoe.policy.answering import Answering
from smoe.policy.budget import Ledger
from smoe.policy.importance import ALL_IMPORTANT
from smoe.policy.prediction import ASKED, Grading, Prediction, Predictor
from smoe.policy.prices import PriceTable
from smoe.policy.quality_budget import QualityBudget, TimeBudget, nats_of_perplexity
from smoe.policy.registry import make_eviction_for, predictor_kind
from smoe.policy.residency import PoolSize
from smoe.report.pace import UNKNOWN, Pace
from smoe.report.step_times import Work, in_a_crowd, of_first_loads, times_for
from smoe.report.usual_text import PROMPT_TOKENS
from smoe.routing import Phase, Routing
from smoe.runtime.substitution import substitution_of
from smoe.simulator.foresight import Foresight, Recorded, blurred
from smoe.simulator.synthetic import TYPICAL, DrawnShape, Habits, synthesise
from smoe.simulator.virtual_clock import StepTimes, Timed, VirtualClock

_WARM_UP, _STEPS = 16, 32
"""The numbers of simulated decode steps: warm-up steps that do not count, then counted ones."""
FIRST_TOKENS = 32
"""The number of tokens at the beginning of an answer whose speed is stated apart. They are slower, because experts are
missing that later tokens find in memory."""
COMPARED_STEPS = 16
"""The number of counted decode steps in simulations that compare budgets and presets. Speeds from so few steps differ
from those of all steps by 1 % in the mean, and 7 % at most."""
_LOOK_STEPS = 8
"""The number of last warm-up steps in which the simulation measures how much of the time experts are read. Reads slow
down concurrent computing."""
MOST_LAYERS, COMPARED_LAYERS = 12, 6
"""The largest number of simulated layers: of a forecast, and of simulations that compare budgets and presets. Speeds of
6 layers differ from those of 12 by 2 % in the mean, and 6 % at most (docs/log/forecasts.md)."""


@dataclass(frozen=True)
class Simulated:
    """The speed and the times that the simulation of a run has given."""

    seconds_per_token: float
    ttft_seconds: float
    """Seconds to the first token of the scene's prompt, with an empty cache."""
    beginning_seconds: float
    """Seconds from the first token to the last of the first `FIRST_TOKENS` tokens of an answer."""
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
        """The speed after the first tokens."""
        return 1 / self.seconds_per_token

    @property
    def first_tokens_per_second(self) -> float:
        """The speed of the first `FIRST_TOKENS` tokens of an answer."""
        return (FIRST_TOKENS - 1) / self.beginning_seconds

    def answer_seconds(self, tokens: float) -> float:
        """Return the seconds from the first to the last token of an answer of `tokens` tokens."""
        later = max(0.0, tokens - FIRST_TOKENS)
        return self.beginning_seconds * min(1.0, (tokens - 1) / (FIRST_TOKENS - 1)) + later * self.seconds_per_token

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

    @property
    def slots(self) -> int:
        """The number of cache slots at the end of the simulated text."""
        return self.ledger.slots_of_text(self.prompt_tokens + _WARM_UP + _STEPS)


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
    """Whether every expert has a slot of its own. The engine then loads all experts, and decode steps load nothing once
    it has loaded them."""


def _begin(scene: Scene, habits: Habits) -> _Begun:
    work, config = scene.work, scene.config
    times = times_for(scene.machine, work, config.host_memory_bytes, scene.faster_reads, scene.pace)
    layers = scene.layers
    if scene.pace.skew is not None:
        habits = replace(habits, skew=scene.pace.skew * habits.skew)
    drawn = Drawn(DrawnShape(work.experts, work.top_k, layers, _WARM_UP + _STEPS, scene.prompt_tokens), habits)
    clock, is_all_resident = _clock(scene, times, layers), scene.ledger.cache_slots >= work.layers * work.experts
    clock.change_times(of_first_loads(times))
    served = layers * (1 + (0 if is_all_resident else max(0, _WARM_UP - _LOOK_STEPS)))
    prompt = drawn.trace[:layers]
    for n, routing in enumerate(prompt, start=1):
        clock.serve(routing, _read_ahead(prompt[n : n + 1]))
    clock.change_times(times)
    for routing in drawn.trace[layers:served]:
        clock.serve(routing)
    return _Begun(clock, times, drawn, served, is_all_resident)


def _read_ahead(following: Sequence[Routing]) -> list[Prediction]:
    """Return the predictions of the experts that layers of a prompt choose, whose routings are `following`. The engine
    predicts the next layer's experts by its router, which for a prompt finds nearly all of them."""
    return [Prediction(each.layer, sorted(set(chain.from_iterable(each.top_k_index)))) for each in following]


def _finish(scene: Scene, begun: _Begun) -> Simulated:
    """Return the simulated times of a run that has begun. The run is not changed, so others can start from it too."""
    work, layers, steps = scene.work, begun.drawn.shape.layers, scene.steps
    scale, prefill_seconds = work.layers / layers, begun.clock.result.prefill_seconds
    if begun.is_all_resident:
        times, uses, loads, alone, weighed = begun.times, steps * layers * work.top_k, 0, 0, 0.0
        by_device = weighed = float(uses)
        seconds = work.layers * (times.layer(1) + times.deciding + work.top_k * times.expert(1))
        beginning = (FIRST_TOKENS - 1) * seconds + (0.0 if scene.is_compared else scale * _delay_by_filling(begun))
    else:
        timed, before, times = _served(scene, begun, steps)
        seconds = scale * sum(timed.step_seconds[_WARM_UP:]) / steps
        beginning = scale * sum(timed.step_seconds[: FIRST_TOKENS - 1]) + (scene.pace.beginning or 0.0)
        uses, loads = timed.uses - before.uses, timed.loads - before.loads
        by_device = uses - timed.computed_by_host * steps / (steps + _WARM_UP)
        alone = timed.computed_alone - before.computed_alone
        weighed = by_device + (times.alone - 1) * alone
    return Simulated(
        seconds,
        scale * prefill_seconds,
        beginning,
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
        reading = missing * times.load if first else work.experts * of_first_loads(times).load
        seconds += work.layers * max(computing, reading)
    return seconds


def _delay_by_filling(begun: _Begun) -> float:
    """Return the seconds by which the first tokens of an answer take longer in the simulated layers, because experts
    that the prompt has not used are still being loaded. Ends with the step in which the last load has ended."""
    layers, trace = begun.drawn.shape.layers, begun.drawn.trace
    first_loads = of_first_loads(begun.times)
    clock, busy = begun.clock.fork(None), in_a_crowd(first_loads, 1.0)
    clock.fill([(layer, expert) for layer in range(layers) for expert in range(begun.drawn.shape.experts)])
    steps = 0
    while clock.is_loading and steps < FIRST_TOKENS - 1:
        clock.change_times(busy)
        begins = layers * (1 + steps)
        for routing in trace[begins : begins + layers]:
            clock.serve(routing)
        steps += 1
    times = begun.times
    usual = layers * (times.layer(1) + times.deciding + begun.drawn.shape.top_k * times.expert(1))
    return max(0.0, sum(clock.result.step_seconds) - steps * usual)


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
        times = in_a_crowd(times, _reading(clock.result, unseen))
        clock.change_times(times)
    before = replace(clock.result, step_seconds=[])
    for routing in trace[first : first + layers * steps]:
        clock.serve(routing)
    return clock.result, before, times


def _reading(timed: Timed, before: Timed) -> float:
    """Return the fraction of the time since the snapshot `before` in which at least one read was running."""
    seconds = sum(timed.step_seconds[len(before.step_seconds) :])
    return (timed.link_seconds - before.link_seconds) / seconds


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
    slots = max(work.top_k, round(share * scene.slots))
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
    reading = sum(sum(rows.values()) for rows in prompt) * of_first_loads(times).load
    computing = layers * times.layer(drawn.shape.prompt_tokens)
    computing += sum(count * times.expert(rows) for of_layer in prompt for rows, count in of_layer.items())
    return {"link" if scene.machine.has_link else "disk": scale * reading, "computing": scale * computing}


@cache
def _prompt(shape: DrawnShape, habits: Habits) -> list[Counter[int]]:
    """Return, for each layer, {number of prompt tokens: number of experts that so many tokens have chosen}."""
    prompt = _synthesised(shape, habits)[: shape.layers]
    assert all(routing.phase is Phase.PREFILL for routing in prompt), "a prompt comes first"
    return [Counter(Counter(chain.from_iterable(routing.top_k_index)).values()) for routing in prompt]
