"""A running engine, as somebody who watches it is told: what does not change once, then what has happened since the
last look.

Experts are numbered through: those of the first layer with experts from 0 on, then those of the next. Lists of pairs
lie flat, `[expert, count, expert, count, ...]`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from smoe.expert import LOW, ExpertKey
from smoe.metrics import Counters
from smoe.policy.plan import DEVICE, FIRST_WORKER
from smoe.report.run import seconds_by_part
from smoe.routing import Phase
from smoe.runtime.engine import Engine
from smoe.runtime.watch import LayerNote, PassNote, Watch
from smoe.simulator.stack_distances import misses_by_size

ABSENT, LOW_COMING, COMING, LOW_HERE, PASSING, HERE = range(6)
"""Where an expert is: in no slot; its low copy or its own under way; its low copy in a slot; its own in a staging slot,
or in a cache slot. The best that there is of it."""
TIERS = ("absent", "low coming", "coming", "low", "passing", "here")
EVENTS = ("used", "read", "replaced", "right", "wrong", "by_cpu", "by_worker")
"""What befalls an expert: a step used it; a load began, asked for or guessed; a route of its was served by another
expert or nobody; it was prefetched and wanted, or not; the CPU beside the device, or a worker, computed it."""
CURVE_USES = 8192
"""Of the last decode steps: the second half is counted, the first has filled the caches."""
CURVE_SECONDS = 2.0
CURVE_POINTS = 48


class Watched:
    """One engine, watched. `look` is called by one thread, not the engine's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table = engine.executor.table
        self._watch = Watch(engine.executor)
        experts = {layer: held.experts for layer, held in sorted(engine.store.layers.items())}
        starts = np.cumsum([0, *experts.values()]).tolist()
        self._first = dict(zip(experts, starts, strict=False))
        """The number of each layer's first expert."""
        self._experts = experts
        self._count = starts[-1]
        self.tiers = bytes(self._count)
        """Of every expert, as of the last look."""
        self._last_pass: PassNote | None = None
        self._uses: deque[int] = deque(maxlen=CURVE_USES)
        self._drawn = -CURVE_SECONDS
        self._has_new_uses = False
        self._was_busy = True
        """Whether passes were made before the last look."""

    def begin(self) -> None:
        """Somebody looks: from now on things are noted."""
        self._last_pass, self._was_busy = None, True
        self._watch.begin()

    def end(self) -> None:
        """Nobody looks any more."""
        self._watch.end()

    def described(self) -> dict[str, Any]:
        """What does not change while the engine lives. Sizes are in bytes."""
        engine, config, ledger = self._engine, self._engine.config, self._engine.ledger
        return {
            "layers": [[layer, experts] for layer, experts in self._experts.items()],
            "budget": ledger.budget_bytes,
            "memory": ledger.entries(),
            "slots": ledger.cache_slots,
            "resident_share": ledger.resident_share,
            "expert_bytes": ledger.entries()["expert slots"] / ledger.cache_slots,
            "precision": None if config.precision == "auto" else config.precision,
            "low": config.low_precision if self._table.has_low else None,
            "has_device": engine.executor.device.type != "cpu" or engine.pacing.is_emulated,
            "prefetches": config.prefetch != "none",
            "replaces": bool(config.alpha > 0 or config.prices_answers or self._table.has_low),
            "by_cpu": any(DEVICE < unit < FIRST_WORKER for unit in engine.executor.compute.units),
            "by_worker": engine.executor.compute.others is not None,
            "eviction": config.eviction,
            "lossy": list(config.lossy),
            "tiers": TIERS,
            "events": EVENTS,
        }

    def look(self) -> dict[str, Any]:
        """What has happened since the last look; what has not is left out.

        `decode`: of the decode steps that have ended, `tokens`, `seconds`, `bytes` read, expert `uses`, the `hits` of
        them, and the seconds' `parts`; `prompt`: tokens read; `tiers` [expert, tier, ...] where another; every one of
        `EVENTS` [expert, count, ...]; `curve`: [slots, ...] and the share of the uses that would be `misses`.
        """
        notes, found = self._watch.taken(), dict[str, Any]()
        events = {name: Counter[int]() for name in EVENTS}
        passes = []
        for note in notes:
            if isinstance(note, LayerNote):
                self._count_layer(note, events)
            else:
                passes.append(note)
        if passes:
            found |= self._passes(passes)
        found |= {name: list(chain.from_iterable(count.items())) for name, count in events.items() if count}
        if notes or self._was_busy:  # what its last layer did to the slots is seen by the look after
            changed = self._changed_tiers()
            if changed:
                found["tiers"] = changed
        self._was_busy = bool(notes)
        now = self._engine.now()
        if self._has_new_uses and now - self._drawn >= CURVE_SECONDS:
            self._drawn, self._has_new_uses = now, False
            found["curve"] = self._curve()
        return found

    def _count_layer(self, note: LayerNote, events: dict[str, Counter[int]]) -> None:
        routing, decision, first = note.routing, note.decision, self._first[note.routing.layer]
        served = sorted(first + serve.key[1] for serve in decision.plan.serves)
        events["used"].update(served)
        if routing.phase is Phase.DECODE:
            self._uses.extend(served)
            self._has_new_uses = True
        for serve in decision.plan.serves:
            if serve.unit != DEVICE:
                events["by_cpu" if serve.unit < FIRST_WORKER else "by_worker"][first + serve.key[1]] += 1
        events["read"].update(first + load.key[1] for load in decision.plan.loads)
        for name, keys in (("read", note.fetched), ("right", note.right), ("wrong", note.wrong)):
            if keys:
                events[name].update(self._number(key) for key in keys)
        served_rows = decision.routing.top_k_index
        if served_rows is not routing.top_k_index:
            for chosen, got in zip(routing.top_k_index, served_rows, strict=True):
                events["replaced"].update(first + a for a, b in zip(chosen, got, strict=True) if a != b)

    def _passes(self, passes: Sequence[PassNote]) -> dict[str, Any]:
        """Of the decode steps that another has followed: what is between two of them belongs to the first."""
        tokens, seconds, read, sums = 0, 0.0, 0, Counters()
        for note in passes:
            before, self._last_pass = self._last_pass, note
            if before is None or before.phase is not Phase.DECODE or note.phase is not Phase.DECODE:
                continue
            if note.counters.forward_passes <= before.counters.forward_passes:
                continue  # counted anew, or made again after an error
            tokens += before.tokens
            seconds += note.now - before.now
            read += note.bytes_read - before.bytes_read
            sums = _sum(sums, note.counters - before.counters)
        found: dict[str, Any] = {}
        prompt = sum(note.tokens for note in passes if note.phase is Phase.PREFILL)
        if prompt:
            found["prompt"] = prompt
        if tokens:
            has_link = self._engine.executor.device.type == "cuda" or self._engine.pacing.is_emulated
            parts = seconds_by_part(sums, seconds, has_link)
            found["decode"] = {
                "tokens": tokens,
                "seconds": seconds,
                "bytes": read,
                "uses": sums.decode_uses,
                "hits": sums.decode_hits,
                "parts": {name: spent for name, spent in parts.items() if spent > 0},
            }
        return found

    def _changed_tiers(self) -> list[int]:
        """Pairs of an expert and where it is now, of those that are elsewhere than at the last look."""
        table, before = self._table, self.tiers
        now = np.zeros(self._count, np.uint8)
        ready, staged = list(table.ready), table.staged.copy()
        for keys, own, low in ((list(table.inflight), COMING, LOW_COMING), (ready, HERE, LOW_HERE)):
            numbers = [(self._number(key), low if key[2] == LOW else own) for key in keys]
            if numbers:
                at, tier = np.array(numbers).T
                np.maximum.at(now, at, tier.astype(np.uint8))
        passing = [self._number(key) for key in staged if key[2] != LOW]
        now[passing] = np.minimum(now[passing], PASSING)
        self.tiers = now.tobytes()
        changed = np.flatnonzero(now != np.frombuffer(before, np.uint8))
        return np.stack([changed, now[changed]], 1).reshape(-1).tolist()  # type: ignore[no-any-return]

    def _curve(self) -> dict[str, list[float]]:
        misses = misses_by_size(np.array(self._uses, np.int64), len(self._uses) // 2)
        slots = np.unique(np.linspace(0, len(misses) - 1, CURVE_POINTS).astype(int))
        counted = len(self._uses) - len(self._uses) // 2
        return {"slots": slots.tolist(), "misses": (misses[slots] / counted).round(4).tolist()}

    def _number(self, key: ExpertKey) -> int:
        return self._first[key[0]] + key[1]


def _sum(left: Counters, right: Counters) -> Counters:
    return Counters(**{name: value + getattr(right, name) for name, value in vars(left).items()})
