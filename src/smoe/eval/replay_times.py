"""The times of this machine for replays on the virtual clock, computed from the engine's counters in an observed run.

Two of the times need more than the counters. *Waiting*: if reads compete with computing for the processor, or are
passed between threads, waiting for an expert takes longer than reading it. The time of a load is therefore chosen such
that the replay of the observed run waits as long as the engine did. *Deciding*: an eviction policy is Python code that
runs in every layer. Its time is measured during the replay, in place of that of the policy in the observed run.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import replace

from smoe.expert import ExpertKey
from smoe.metrics import Counters
from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.prediction import Predictor
from smoe.policy.registry import make_eviction_for
from smoe.routing import Routing
from smoe.runtime.engine import Engine
from smoe.simulator.virtual_clock import StepTimes, Timed, replay_on_clock

WARM_SHARE = 1 / 3
"""The fraction of a trace's steps, at its beginning, that only fill the cache and are not counted."""
_HALVINGS = 8


def times_of(engine: Engine, counted: Counters) -> StepTimes:
    """Return the times of a load, an expert, a layer and planning on this machine, from the counters of a run."""
    passes = max(1, counted.forward_passes) * len(engine.store.layers)
    loads = max(1, counted.loads + counted.prefetches)
    expert, layer = counted.compute_seconds / max(1, counted.decode_uses), counted.dense_seconds / passes
    return StepTimes(
        load=counted.read_busy_seconds / loads,
        expert=lambda rows: expert * rows,
        layer=lambda tokens: layer,
        deciding=counted.plan_seconds / passes,
    )


def as_waited(engine: Engine, trace: Sequence[Routing], times: StepTimes, waited_seconds: float) -> StepTimes:
    """Return `times` with another load time, with which the replay waits as long as the engine did. The deciding time
    no longer contains the engine's eviction policy.

    `trace`: decode steps that the engine has computed with its own eviction policy and without prefetch.
    `waited_seconds`: how long the engine has waited for experts in these steps.
    """

    def replayed(load: float) -> float:
        timed, _ = _replayed(engine, trace, engine.eviction_settings, replace(times, load=load), None)
        return sum(timed.step_seconds)

    unwaited, most = replayed(0.0), max(times.load, 1e-9)
    while most < waited_seconds and replayed(most) - unwaited < waited_seconds:
        most *= 2
    least = 0.0
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        if replayed(middle) - unwaited <= waited_seconds:
            least = middle
        else:
            most = middle
    _, watched = _replayed(engine, trace, engine.eviction_settings, times, None)
    deciding = max(0.0, times.deciding - watched.seconds / max(1, len(trace)))
    return replace(times, load=least, deciding=deciding)


def on_clock(
    engine: Engine, trace: Sequence[Routing], eviction: EvictionSettings, times: StepTimes, by: Predictor | None
) -> float:
    """Return the seconds per token of a replay, averaged over the steps after the cache is filled. They include the
    Python code of the eviction policy. `by`: the predictor; None: no prefetch."""
    timed, watched = _replayed(engine, trace, eviction, times, by)
    steps = timed.step_seconds[int(len(timed.step_seconds) * WARM_SHARE) :]
    return sum(steps) / len(steps) + watched.seconds / len(timed.step_seconds)


def _replayed(
    engine: Engine, trace: Sequence[Routing], eviction: EvictionSettings, times: StepTimes, by: Predictor | None
) -> tuple[Timed, TimedEviction]:
    ledger = engine.ledger
    experts = {layer: of.experts for layer, of in engine.store.layers.items()}
    policy = TimedEviction(make_eviction_for(eviction, ledger.pools, experts))
    timed = replay_on_clock(trace, ledger.cache_slots, ledger.pools[0].staging, policy, times, predictor=by)
    return timed, policy


OBSERVED, ASKED = "layer heard", "question"


class TimedEviction(Eviction):
    """Wraps an eviction policy and measures its processor time."""

    def __init__(self, policy: Eviction) -> None:
        self.name = policy.name
        self._policy = policy
        self._took: dict[str, list[float]] = {OBSERVED: [], ASKED: []}

    @property
    def seconds(self) -> float:
        """The processor time of the policy so far, in seconds."""
        return sum(map(sum, self._took.values()))

    def microseconds(self) -> dict[str, float]:
        """Return the mean microseconds for each observed layer and for each query for victims."""
        return {what: round(1e6 * sum(took) / max(1, len(took)), 1) for what, took in self._took.items()}

    @property
    def rule(self) -> str:
        return self._policy.rule

    def insert(self, key: ExpertKey) -> None:
        self._policy.insert(key)

    def remove(self, key: ExpertKey) -> None:
        self._policy.remove(key)

    def residents(self) -> set[ExpertKey]:
        return self._policy.residents()

    def observe(self, routing: Routing) -> None:
        began = time.thread_time()
        self._policy.observe(routing)
        self._took[OBSERVED].append(time.thread_time() - began)

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        began = time.thread_time()
        found = self._policy.victims(count, shield)
        self._took[ASKED].append(time.thread_time() - began)
        return found

    def of(self, form: int) -> Eviction:
        return self._policy.of(form)

    def worth(self, key: ExpertKey) -> float:
        return self._policy.worth(key)
