"""Compares the times of predictors and eviction policies on a user's text: all candidates are simulated, then the best
ones are run.

    run the text once -> the routers' choices, every predictor's predictions, all times
                      -> every candidate on the virtual clock, with these times -> seconds per token
                      -> the best ones, and the baseline, alternately on this machine -> the winner

The simulation executes the engine's own plans. It does not know how much a prefetch slows concurrent computing, so real
time decides. `none` and the baselines are always among the finalists.

The *baseline* is the predictor or eviction policy that is used without a tournament. It wins ties: another candidate
replaces it only if it was faster by more than `LEAD` in every round. If two candidates are equally fast, one leads in
three rounds by chance with a probability below one in eight.

Eviction policies compete first, without prefetch. The winner is then used for the predictors, in the simulation and in
the finals, so that both winners have run together. If only predictors compete, the engine's own eviction policy is
used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.bounds import DEFAULT_PREFETCH_DEPTH
from smoe.errors import ConfigError, SmoeError
from smoe.eval.eviction_entrants import Refused, evictions_of, refused_by
from smoe.eval.replay_times import as_waited, on_clock, times_of
from smoe.generation.teacher_forcing import forced
from smoe.load.engine_parts import scoring_rules
from smoe.load.learned import learned_by, predictor_name
from smoe.metrics import Counters
from smoe.models.spec import LibrarySpec
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.prediction import Moment, Prediction, Predictor, Sight
from smoe.policy.registry import PREDICTORS
from smoe.policy.step import Decision
from smoe.prediction.inputs import PredictorInputs
from smoe.routing import Phase, Routing
from smoe.runtime.engine import Engine
from smoe.runtime.observer import StepObserver
from smoe.runtime.step import Step
from smoe.simulator.foresight import Recorded
from smoe.simulator.virtual_clock import StepTimes

LEAST_TOKENS = 96
"""The smallest number of tokens of the text. A third of them only fills the cache (`WARM_SHARE`)."""
TURN_WARM, TURN_TIMED = 16, 32
"""The numbers of tokens in one run of a finalist: first `TURN_WARM` that are not measured, then `TURN_TIMED` that
are."""
ROUNDS, MOST_ROUNDS = 3, 7
"""A candidate must lead in `ROUNDS` rounds to replace the baseline. There are more rounds, at most `MOST_ROUNDS`, if
the fastest candidate has not won all of them."""
FINALISTS = 3
"""The number of finalists for each setting, the best ones of the simulation. `ALWAYS` and the baseline are always among
them."""
ALWAYS = {"prefetch": "none", "eviction": "auto"}
LEAD = 0.02
"""A candidate wins a round if it is faster than the baseline by more than this fraction."""

Tick = Callable[[int], None]


@dataclass(frozen=True)
class Entrant:
    """A candidate of a tournament (a predictor or an eviction policy) with its results."""

    name: str
    simulated_seconds: float
    """The seconds per token on the virtual clock."""
    measured_seconds: tuple[float, ...] = ()
    """The median seconds per token in each round; empty if the candidate is not a finalist."""
    asking_seconds: float = 0.0
    """The seconds that one prediction takes."""
    recall: float | None = None
    """The fraction of the next layer's experts that were predicted."""
    precision: float | None = None
    """The fraction of the predicted experts that were chosen."""

    @property
    def seconds(self) -> float:
        """The measured seconds per token, or the simulated ones if the candidate is not a finalist."""
        return median(self.measured_seconds) if self.measured_seconds else self.simulated_seconds

    def beats(self, baseline: Entrant) -> bool:
        """Return whether this candidate won at least `ROUNDS` more rounds against the baseline than it did not win."""
        return 2 * self.won(baseline) - len(self.measured_seconds) >= ROUNDS

    def won(self, baseline: Entrant) -> int:
        """Return the number of rounds in which this candidate was faster than the baseline by more than `LEAD`."""
        rounds = zip(self.measured_seconds, baseline.measured_seconds, strict=True)
        return sum(own < (1 - LEAD) * other for own, other in rounds)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds}


@dataclass(frozen=True)
class Tournament:
    """The candidates for one setting with their results, the winner first."""

    kind: str
    """The name of the setting: `prefetch` or `eviction`."""
    baseline: str
    """The candidate that the other candidates must beat: `serves`, or `none` if `serves` cannot take part."""
    serves: str
    """The value of the setting that is used without a tournament."""
    entrants: tuple[Entrant, ...]
    refused: Mapping[str, Refused]
    """{name: reason} of the candidates that could not take part."""

    @property
    def winner(self) -> Entrant:
        return self.entrants[0]

    @property
    def stays(self) -> bool:
        """Whether the value `serves` has won, so that the setting does not change."""
        return self.winner.name == self.serves

    def as_json(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline,
            "winner": self.winner.name,
            "entrants": [entrant.as_json() for entrant in self.entrants],
            "refused": {name: refused.why for name, refused in self.refused.items()},
        }


class _RoutingCollector(StepObserver):
    """An observer that stores every routing, and the predictions that each predictor makes after the layer's experts
    are computed."""

    def __init__(self, predictors: Mapping[str, Predictor], now: Callable[[], float]) -> None:
        """`now`: the engine's clock, with which the time spent on observing is measured."""
        self.trace: list[Routing] = []
        self.predictions: dict[str, list[Sequence[Prediction]]] = {name: [] for name in predictors}
        self.asking: dict[str, list[float]] = {name: [] for name in predictors}
        self._predictors = predictors
        self._now = now
        self._planned_seconds = self._computed_seconds = 0.0
        """Two times in seconds that were spent on observing: while the engine plans, and while it computes experts."""

    def less_listening(self, counted: Counters) -> Counters:
        """Return the engine's counters without the time that was spent on observing."""
        return replace(
            counted,
            plan_seconds=counted.plan_seconds - self._planned_seconds,
            forward_seconds=counted.forward_seconds - self._planned_seconds - self._computed_seconds,
        )

    def planned(self, routing: Routing, decision: Decision) -> None:
        began = self._now()
        self.trace.append(routing)
        for name, predictor in self._predictors.items():
            predictor.observe(routing)
            self.predictions[name].append(())
        self._planned_seconds += self._now() - began

    def computed(self, step: Step, output: torch.Tensor) -> None:
        if step.phase is not Phase.DECODE:
            return
        started, routing = self._now(), self.trace[-1]
        for name, predictor in self._predictors.items():
            predictor.observe_input(routing, step.hidden)
            partial = output if predictor.asked is Moment.RESIDENTS_DONE else None
            began = time.perf_counter()
            answers = iter(predictor.predict(Sight(step.layer, step.hidden, partial)))
            first = next(answers, None)
            self.asking[name].append(time.perf_counter() - began)
            if first is not None:
                self.predictions[name][-1] = [_on_host(answer) for answer in chain([first], answers)]
        self._computed_seconds += self._now() - started


def _on_host(answer: Prediction) -> Prediction:
    return answer._replace(experts=tuple(answer.experts))


def predictors_of(model: PreTrainedModel, spec: LibrarySpec) -> tuple[dict[str, Predictor], dict[str, Refused]]:
    """Return ({name: predictor} of the predictors that can take part, {name: reason} of the others)."""
    engine: Engine = model.offload  # type: ignore[assignment]
    depth = engine.config.prefetch_depth or DEFAULT_PREFETCH_DEPTH
    place, found = Path(spec.config.name_or_path), dict[str, Predictor]()
    refused: dict[str, Refused] = {}
    try:
        rules = scoring_rules(model, spec)
    except SmoeError:
        rules = {}
    for name in PREDICTORS.built_in:
        kind = PREDICTORS.find(name)
        if not kind.can_compete:
            continue
        try:
            learned = learned_by(kind, name, place, spec, depth)
            predictor = kind.make(PredictorInputs(model, spec, rules, engine.config.prefetch_what, depth, learned))
        except (SmoeError, KeyError, OSError) as error:
            refused[name] = refused_by(error)
            continue
        if predictor is not None:
            found[name] = predictor
    return found, refused


def serving_prefetch(model: PreTrainedModel, spec: LibrarySpec) -> str:
    """Return the name of the predictor that is used for `prefetch` auto if there was no tournament."""
    engine: Engine = model.offload  # type: ignore[assignment]
    return predictor_name(spec, replace(engine.config, prefetch="auto"), model.device)


@torch.no_grad()
def hold(
    model: PreTrainedModel,
    spec: LibrarySpec,
    ids: Sequence[int],
    kinds: Sequence[str],
    tick: Tick,
) -> list[Tournament]:
    """Hold a tournament for each of the settings `kinds` (`prefetch`, `eviction`) on the text `ids`. `tick` is called
    for every token. Return the results.

    Eviction policies compete first. Afterwards the engine uses the winners. Raise `ConfigError` if the text is too
    short, or if every expert fits.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    _check(engine, len(ids))
    predictors, refused = predictors_of(model, spec) if "prefetch" in kinds else ({}, {})
    evictions, absent = evictions_of(model, spec) if "eviction" in kinds else ({}, {})
    listener = _RoutingCollector(predictors, engine.now)
    engine.executor.guess_by(None)
    engine.executor.reset(engine.fresh_eviction())
    before = engine.stats()
    with engine.observed_by(listener):
        for _ in forced(model, ids, engine.new_cache()):
            tick(1)
    counted = listener.less_listening(engine.stats() - before)
    times = as_waited(engine, listener.trace, times_of(engine, counted), counted.wait_seconds)
    found = []
    if "eviction" in kinds:
        entrants = [_evict(engine, listener, settings, times) for settings in evictions.values()]
        turns = _Turns(model, ids, tick, lambda name: engine.use_eviction(evictions[name]))
        found.append(_finish("eviction", "auto", "auto", entrants, absent, turns))
    if "prefetch" in kinds:
        serves = usual = serving_prefetch(model, spec)
        if usual not in ("none", *predictors):
            refused[usual] = Refused(
                f"`prefetch={usual}`, which auto stands for here, runs layers of the model: others cannot be compared"
            )
            usual = "none"
        entrants = [_guess(engine, listener, name, predictors.get(name), times) for name in ("none", *predictors)]
        turns = _Turns(model, ids, tick, lambda name: _by_predictor(engine, predictors, name))
        found.append(_finish("prefetch", usual, serves, entrants, refused, turns))
    return found


def tokens_of(length: int, kinds: Sequence[str]) -> int:
    """Return the largest number of tokens that `hold` processes."""
    return length + len(kinds) * FINALISTS * MOST_ROUNDS * (TURN_WARM + TURN_TIMED)


def _check(engine: Engine, tokens: int) -> None:
    if engine.ledger.holds_all:
        raise ConfigError(
            "every expert fits in memory, so no expert is prefetched or evicted; give less `memory`, or a share "
            "such as `resident_share=0.4`",
            setting="resident_share",
            allowed="less than all experts",
        )
    if tokens < LEAST_TOKENS:
        raise ConfigError.too_few_tokens("text", tokens, LEAST_TOKENS, "for a tournament")


def _evict(engine: Engine, listener: _RoutingCollector, settings: EvictionSettings, times: StepTimes) -> Entrant:
    return Entrant(settings.name, on_clock(engine, listener.trace, settings, times, None))


def _guess(
    engine: Engine, listener: _RoutingCollector, name: str, predictor: Predictor | None, times: StepTimes
) -> Entrant:
    if predictor is None:
        return Entrant(name, on_clock(engine, listener.trace, engine.eviction_settings, times, None))
    predictions, asking = listener.predictions[name], median(listener.asking[name])
    recall, precision = hits(listener.trace, predictions)
    seconds = on_clock(
        engine,
        listener.trace,
        engine.eviction_settings,
        replace(times, asking=asking),
        Recorded(predictions, predictor.asked),
    )
    return Entrant(name, seconds, asking_seconds=asking, recall=recall, precision=precision)


def hits(trace: Sequence[Routing], predictions: Sequence[Sequence[Prediction]]) -> tuple[float, float]:
    """Return (recall, precision) of the predictions for the next layer: the fraction of its experts that were
    predicted, and the fraction of predicted experts that were chosen."""
    chosen = guessed = right = 0
    for number, answers in enumerate(predictions[:-1]):
        after = trace[number + 1]
        near = next((answer for answer in answers if answer.layer == after.layer), None)
        if near is None or after.phase is not Phase.DECODE:
            continue
        wanted = {expert for row in after.top_k_index for expert in row} - {after.experts}
        named = set(near.experts)
        chosen, guessed, right = chosen + len(wanted), guessed + len(named), right + len(wanted & named)
    return (right / chosen if chosen else 0.0, right / guessed if guessed else 0.0)


def _by_predictor(engine: Engine, predictors: Mapping[str, Predictor], name: str) -> None:
    engine.executor.guess_by(predictors.get(name))
    engine.executor.reset(engine.fresh_eviction())


class _Turns(NamedTuple):
    """The arguments with which finalists are run."""

    model: PreTrainedModel
    ids: Sequence[int]
    tick: Tick
    set_up: Callable[[str], None]
    """A function that makes the engine use the candidate of a given name."""


def _finish(
    kind: str,
    baseline: str,
    serves: str,
    entrants: Sequence[Entrant],
    refused: Mapping[str, Refused],
    turns: _Turns,
) -> Tournament:
    """Run the finalists alternately, and return the results. Afterwards the engine uses the winner."""
    ranked = sorted(entrants, key=lambda entrant: entrant.simulated_seconds)
    finalists = finalists_of(ranked, {ALWAYS[kind], baseline})
    rest = [entrant for entrant in ranked if entrant not in finalists]
    took: dict[str, list[float]] = {entrant.name: [] for entrant in finalists}
    measured = list(finalists)
    for number in range(MOST_ROUNDS):
        if number >= ROUNDS and is_decided(measured, baseline):
            turns.tick((MOST_ROUNDS - number) * len(finalists) * (TURN_WARM + TURN_TIMED))
            break
        for entrant in (
            finalists if number % 2 == 0 else finalists[::-1]
        ):  # alternate the order: if the machine becomes slower, all are affected
            turns.set_up(entrant.name)
            took[entrant.name].append(_turn(turns.model, turns.ids, number, turns.tick))
        measured = [replace(entrant, measured_seconds=tuple(took[entrant.name])) for entrant in finalists]
    placed = placed_of(measured, baseline)
    turns.set_up(placed[0].name)
    return Tournament(kind, baseline, serves, (*placed, *rest), refused)


def finalists_of(ranked: Sequence[Entrant], always: Container[str]) -> list[Entrant]:
    """Return the finalists. `ranked`: the candidates in the order of their simulated times. Candidates named in
    `always` are always included."""
    others = [entrant.name for entrant in ranked if entrant.name not in always]
    first = others[: FINALISTS - (len(ranked) - len(others))]
    return [entrant for entrant in ranked if entrant.name in always or entrant.name in first]


def is_decided(finalists: Sequence[Entrant], baseline: str) -> bool:
    """Return whether no more rounds are needed: the fastest candidate so far is the baseline, or it has won enough
    rounds against the baseline."""
    fastest = min(finalists, key=lambda entrant: entrant.seconds)
    usual = next(entrant for entrant in finalists if entrant.name == baseline)
    return fastest is usual or fastest.beats(usual)


def placed_of(finalists: Sequence[Entrant], baseline: str) -> list[Entrant]:
    """Return the finalists in the order of their results. The winner is the fastest candidate that beats the baseline.
    If none does, the baseline is the winner. The others follow by their times."""
    fastest = sorted(finalists, key=lambda entrant: entrant.seconds)
    usual = next(entrant for entrant in fastest if entrant.name == baseline)
    winner = next((entrant for entrant in fastest if entrant.beats(usual)), usual)
    return [winner, *(entrant for entrant in fastest if entrant is not winner)]


def _turn(model: PreTrainedModel, ids: Sequence[int], number: int, tick: Tick) -> float:
    """Return the median seconds of a token, starting with an empty cache, after some tokens that are not measured."""
    engine: Engine = model.offload  # type: ignore[assignment]
    need = TURN_WARM + TURN_TIMED
    begin = number * need % max(1, len(ids) - need + 1)
    seconds = []
    for _, took in forced(model, ids[begin : begin + need], engine.new_cache()):
        seconds.append(took)
        tick(1)
    return median(seconds[TURN_WARM:])
