"""The state of a running engine for the page `/watch`: constant values once, then changes since the last look.

Experts have numbers that run through all layers with experts, from 0 on. Lists of pairs are flat: `[expert, count,
expert, count, ...]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from smoe.expert import LOW, ExpertKey
from smoe.metrics import Counters
from smoe.policy.plan import DEVICE, FIRST_WORKER
from smoe.report.run import seconds_by_part
from smoe.routing import Phase
from smoe.runtime.engine import Engine
from smoe.runtime.watch import PassNote, Watch

ABSENT, LOW_COMING, COMING, LOW_HERE, PASSING, HERE = range(6)
"""The tiers of an expert's best copy: in no slot; low-precision copy in flight; full copy in flight; low-precision copy
in a slot; full copy in a staging slot; full copy in a cache slot."""
TIERS = ("absent", "low coming", "coming", "low", "passing", "here")
EVENTS = ("used", "read", "replaced", "right", "wrong", "by_cpu", "by_worker")
"""Kinds of events of an expert (`runtime/watch.py`), for prompts and decode steps together."""
CURVE_USES = 8192
"""The number of last decode uses for the miss-ratio curve: the second half is counted, the first fills the caches."""
CURVE_SECONDS = 2.0
CURVE_POINTS = 48


class Watched:
    """Observes one engine for the page `/watch`. One thread, which is not the engine's, calls `look`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table = engine.executor.table
        self._experts = {layer: held.experts for layer, held in sorted(engine.store.layers.items())}
        self._starts = np.cumsum([0, *self._experts.values()])
        self._count = int(self._starts[-1])
        self._first: dict[int, int] = dict(zip(self._experts, self._starts.tolist(), strict=False))
        """The number of the first expert of each layer."""
        self._watch = Watch(engine.executor, self._first)
        self.tiers = bytes(self._count)
        """The tier of every expert at the last look."""
        self._was_busy = True
        """Whether passes were running at the last look. The next look then searches for changes too."""
        self._last_pass: PassNote | None = None
        self._uses = np.zeros(0, np.int64)
        """The experts of the last `CURVE_USES` uses in decode steps."""
        self._drawn = -CURVE_SECONDS
        self._has_new_uses = False

    def begin(self) -> None:
        """Start to record the engine's events, because a page is open."""
        self._last_pass, self._was_busy = None, True
        self._watch.begin()

    def end(self) -> None:
        """Stop recording events, because the last page has closed."""
        self._watch.end()

    def described(self) -> dict[str, Any]:
        """Return the values that stay constant while the engine lives: layers, slots, settings, and sizes in bytes."""
        engine, config, ledger = self._engine, self._engine.config, self._engine.ledger
        return {
            "layers": [[layer, experts] for layer, experts in self._experts.items()],
            "budget": ledger.budget_bytes,
            "memory": ledger.entries(),
            "slots": ledger.cache_slots,
            "most_slots": ledger.most_slots,
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
        """Return the changes since the last look.

        `decode`: for finished decode steps, `tokens`, `seconds`, `bytes` read, expert `uses`, `hits` and the `parts` of
        the seconds. `prompt`: tokens read. `tiers`: [expert, tier, ...] of changed experts. Each of `EVENTS`: [expert,
        count, ...]. `curve`: [slots, ...] with `misses`, the miss ratios.
        """
        noted, passes = self._watch.taken()
        found: dict[str, Any] = {}
        decoded = np.array(noted.pop("decoded"), np.int64)
        if len(decoded):
            self._uses = np.concatenate([self._uses, self._in_order(decoded)])[-CURVE_USES:]
            self._has_new_uses = True
            noted["used"].extend(decoded.tolist())
        is_busy = bool(passes or noted["used"])
        for name, numbers in noted.items():
            if numbers:
                counts = np.bincount(numbers)
                found[name] = _pairs(np.flatnonzero(counts), counts)
        if passes:
            found |= self._passes(passes)
        if is_busy or self._was_busy:  # the changes of its last layer are seen by the next look
            changed = self._changed_tiers()
            if changed:
                found["tiers"] = changed
        self._was_busy = is_busy
        now = self._engine.now()
        if self._has_new_uses and now - self._drawn >= CURVE_SECONDS:
            self._drawn, self._has_new_uses = now, False
            found["curve"] = self._curve()
        return found

    def _in_order(self, numbers: np.ndarray) -> np.ndarray:
        """Return the experts of each layer and step in ascending order. Plans order experts by residency, but routers
        do not."""
        layers = np.searchsorted(self._starts, numbers, side="right")
        runs = np.cumsum(np.diff(layers, prepend=layers[:1]) != 0)
        return numbers[np.lexsort((numbers, runs))]

    def _passes(self, passes: Sequence[PassNote]) -> dict[str, Any]:
        """Return the sums over the decode steps that were followed directly by another decode step. The time between
        two steps counts for the first of them."""
        tokens, seconds, read, sums = 0, 0.0, 0, Counters()
        for run in self._runs(passes):
            first, last = run[0], run[-1]
            tokens += sum(note.tokens for note in run[:-1])
            seconds += last.now - first.now
            read += last.bytes_read - first.bytes_read
            sums = last.counters - first.counters if sums == Counters() else _sum(sums, last.counters - first.counters)
        self._last_pass = passes[-1]
        found: dict[str, Any] = {}
        prompt = sum(note.tokens for note in passes if note.phase is Phase.PREFILL)
        if prompt:
            found["prompt"] = prompt
        if tokens:
            has_link = self._engine.executor.device.type == "cuda" or self._engine.pacing.is_emulated
            has_workers = self._engine.executor.compute.others is not None
            parts = seconds_by_part(sums, seconds, has_link, has_workers)
            found["decode"] = {
                "tokens": tokens,
                "seconds": seconds,
                "bytes": read,
                "uses": sums.decode_uses,
                "hits": sums.decode_hits,
                "parts": {name: spent for name, spent in parts.items() if spent > 0},
            }
        return found

    def _runs(self, passes: Sequence[PassNote]) -> list[list[PassNote]]:
        """Return the runs of at least two consecutive decode steps, without another pass between them."""
        runs: list[list[PassNote]] = [[]]
        for note in passes if self._last_pass is None else (self._last_pass, *passes):
            before = runs[-1][-1] if runs[-1] else None
            # a repeated pass or reset counters start a new sequence
            if before is not None and note.counters.forward_passes <= before.counters.forward_passes:
                runs.append([])
            if note.phase is Phase.DECODE:
                runs[-1].append(note)
            else:
                runs.append([])
        return [run for run in runs if len(run) > 1]

    def _changed_tiers(self) -> list[int]:
        """Return pairs of an expert and its tier, for experts whose tier has changed since the last look."""
        table, before, first = self._table, self.tiers, self._first
        now = np.zeros(self._count, np.uint8)
        inflight, ready, staged = list(table.inflight), list(table.ready), list(table.staged)
        if table.has_low:
            for keys, low in ((inflight, LOW_COMING), (ready, LOW_HERE)):
                numbers = [first[key[0]] + key[1] for key in keys if key[2] == LOW]
                now[numbers] = np.maximum(now[numbers], low)
            inflight, ready, staged = ([key for key in keys if key[2] != LOW] for keys in (inflight, ready, staged))
        coming = [first[layer] + expert for layer, expert, _ in inflight]
        now[coming] = np.maximum(now[coming], COMING)
        now[[first[layer] + expert for layer, expert, _ in ready]] = HERE
        passing = [self._number(key) for key in staged]
        now[passing] = np.minimum(now[passing], PASSING)
        self.tiers = now.tobytes()
        return _pairs(np.flatnonzero(now != np.frombuffer(before, np.uint8)), now)

    def _curve(self) -> dict[str, list[float]]:
        from smoe.simulator.stack_distances import misses_by_size  # the only import of the simulator in a server

        misses = misses_by_size(self._uses, len(self._uses) // 2)
        slots = np.unique(np.linspace(0, len(misses) - 1, CURVE_POINTS).astype(int))
        counted = len(self._uses) - len(self._uses) // 2
        return {"slots": slots.tolist(), "misses": (misses[slots] / counted).round(4).tolist()}

    def _number(self, key: ExpertKey) -> int:
        return self._first[key[0]] + key[1]


def _sum(left: Counters, right: Counters) -> Counters:
    return Counters(**{name: value + getattr(right, name) for name, value in vars(left).items()})


def _pairs(numbers: np.ndarray, of: np.ndarray) -> list[int]:
    """Return the flat list [number, value, number, value, ...] for these numbers, with the values from `of`."""
    found: list[int] = np.stack([numbers, of[numbers]], 1).reshape(-1).tolist()
    return found
