"""Miss-ratio curves: the misses of every eviction policy for caches of several sizes, and from which size on more
memory saves little.

Every point is the result of `replay` for one policy and size, from an empty cache and without prefetch, as in `smoe
replay`. If there are many points, several processes compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from smoe.errors import ConfigError
from smoe.machine.processor import usable_cores
from smoe.policy.budget import MIN_STAGING_SLOTS
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.registry import EVICTIONS, LEARNED, ONLINE_EVICTION
from smoe.policy.step import observation
from smoe.routing import Phase, Routing
from smoe.simulator.replay import ReplayCounts, first_passes, replay
from smoe.simulator.sweep import sweep
from smoe.trace.file import Trace
from smoe.trace.record import PHASES, TraceHeader
from smoe.units import format_bytes

if TYPE_CHECKING:
    from smoe.policy.eviction.learned import NextUse

SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Cache sizes as fractions of all experts. The sizes of one layer's choice and of one token's choices are added."""
BOUND = "belady"
"""The eviction policy that knows the future, which no policy can beat."""
MOST_PROCESSES = 8
"""The largest number of processes; each takes some hundred megabytes of memory."""
LITTLE = 0.02
"""Memory beyond the plateau saves at most this fraction of the uses."""
_BEND = 0.05
"""How far a knee must be below the straight line from the first point to the plateau, as a fraction of the curve's
height."""
_INLINE_ROUTINGS = 40_000
"""Up to this number of routings, this process computes all points by itself. That takes some seconds, as long as other
processes would need to start."""


@dataclass(frozen=True)
class Curves:
    """The misses in the decode steps of one or several traces, by policy and cache size."""

    slots: tuple[int, ...]
    """Cache sizes in slots, ascending; with the last size all experts are resident."""
    experts: int
    """The number of experts in all layers."""
    steps: int
    """The number of decode steps."""
    uses: int
    misses: dict[str, tuple[int, ...]]
    """For each policy, its misses at every size; `BOUND` is the last policy."""
    steps_are_tokens: bool
    """Whether every step has one token."""
    left_out: dict[str, str]
    """For each policy that could not be replayed, the reason."""

    @property
    def shares(self) -> list[float]:
        """The cache sizes as fractions of all experts."""
        return [slots / self.experts for slots in self.slots]

    def per_step(self, policy: str) -> list[float]:
        """Return the misses per decode step at every size."""
        return [count / self.steps for count in self.misses[policy]]


class _Point(NamedTuple):
    """One point of a miss-ratio curve: a replay of one trace with one policy and one cache size."""

    path: Path
    passes: int
    policy: str
    slots: int
    next_use: NextUse | None


def curves(
    traces: Sequence[Trace],
    passes: int,
    next_use: NextUse | None = None,
    tick: Callable[[int, int], None] = lambda done, points: None,
    processes: int | None = None,
) -> Curves:
    """Return the curves for the first `passes` steps of every trace, each from an empty cache. All traces must be of
    one model.

    `next_use`: the parameters of the policy `learned` for this model; None leaves the policy out. `tick` is called with
    the number of points computed and their total. `processes`: the largest number of processes; None: one for each
    core. Raise `ConfigError` if no trace has decode steps.
    """
    header, shape = traces[0].header, [_decode_rows(trace, passes) for trace in traces]
    if not any(len(rows) for rows in shape):
        raise ConfigError(
            "only prompts were recorded, but misses are counted in decode steps; record generated tokens, or a text "
            "that is processed token by token (smoe record with `text`)",
            setting="trace",
            given=str(traces[0].path),
            allowed="at least one trace with decode steps",
        )
    policies, left_out = _policies(header, next_use)
    sizes = sizes_of(header)
    points = [
        _Point(trace.path, passes, policy, slots, next_use if policy == LEARNED else None)
        for policy in policies
        for slots in sizes
        for trace in traces
    ]
    routings = sum(min(len(trace.routings()), passes * len(header.layers)) for trace in traces)
    if processes is None:
        is_little = routings * len(policies) * len(sizes) <= _INLINE_ROUTINGS
        processes = 1 if is_little else min(usable_cores(), MOST_PROCESSES)
    done = count(1)
    found = sweep(_counts, points, lambda _: tick(next(done), len(points)), processes)
    _routings.cache_clear()
    counted: dict[tuple[str, int], list[ReplayCounts]] = {(policy, slots): [] for policy in policies for slots in sizes}
    for point, counts in zip(points, found, strict=True):
        counted[point.policy, point.slots].append(counts)
    return Curves(
        sizes,
        header.experts,
        sum(len(rows) for rows in shape),
        sum(counts.uses for counts in counted[BOUND, sizes[-1]]),
        {
            policy: tuple(sum(counts.misses for counts in counted[policy, slots]) for slots in sizes)
            for policy in policies
        },
        all((rows == 1).all() for rows in shape),
        left_out,
    )


def sizes_of(header: TraceHeader) -> tuple[int, ...]:
    """Return cache sizes in slots, ascending: for one layer's choice, for one token's choices, and for `SHARES` of all
    experts, without those below the first."""
    least, token = max(layer.top_k for layer in header.layers), sum(layer.top_k for layer in header.layers)
    sizes = {int(header.experts * share) for share in SHARES} | {token}
    return tuple(sorted({least, *(size for size in sizes if size > least)}))


def _decode_rows(trace: Trace, passes: int) -> np.ndarray:
    """Return the number of tokens of every decode step among the first `passes` steps of a trace."""
    rows, first = trace.rows, trace.header.layers[0].layer
    steps = rows["step"]
    counted = (rows["layer"] == first) & (rows["phase"] == PHASES.index(Phase.DECODE))
    begun = np.unique(steps)[:passes]
    return np.unique(steps[counted & np.isin(steps, begun)], return_counts=True)[1]


def _policies(header: TraceHeader, next_use: NextUse | None) -> tuple[list[str], dict[str, str]]:
    """Return (the names of the policies that can be replayed, `BOUND` last; {name of another policy: the reason})."""
    left_out = {}
    if next_use is None:
        left_out[LEARNED] = "no learned parameters for this model on this machine"
    if any(layer.rule is None for layer in header.layers):
        scored = (name for name in ONLINE_EVICTION if EVICTIONS.find(name).needs_scores)
        left_out |= dict.fromkeys(scored, "no scores: smoe does not know the routers' scoring rule")
    return [*(name for name in ONLINE_EVICTION if name not in left_out), BOUND], left_out


@lru_cache(maxsize=2)
def _routings(path: Path, passes: int, has_scores: bool) -> list[Routing]:
    return first_passes(Trace(path).routings(with_scores=has_scores), passes)


def _counts(point: _Point) -> ReplayCounts:
    kind = EVICTIONS.find(point.policy)
    routings = _routings(point.path, point.passes, kind.needs_scores)
    settings = EvictionSettings(point.policy, next_use=point.next_use, future=map(observation, routings))
    return replay(routings, point.slots, MIN_STAGING_SLOTS, kind.of_settings(settings))


class CurveBends(NamedTuple):
    """The two points at which a miss-ratio curve bends, as indices of its sizes. The curve is steep before the knee and
    flat after the plateau."""

    knee: int | None
    """The index of the knee; None if the curve falls evenly."""
    plateau: int
    """The first size beyond which more memory saves at most `LITTLE` of the uses."""


def turns(found: Curves, policy: str) -> CurveBends:
    """Return the knee and the plateau of a policy's miss-ratio curve. The knee is the point before the plateau that is
    furthest below the straight line from the first point to the plateau."""
    shares, misses = found.shares, found.misses[policy]
    plateau = next(n for n, count in enumerate(misses) if count - misses[-1] <= LITTLE * found.uses)
    width, height = shares[plateau] - shares[0], misses[0] - misses[plateau]
    if plateau < 2 or height <= 0:
        return CurveBends(None, plateau)
    bends = [1 - (shares[n] - shares[0]) / width - (misses[n] - misses[plateau]) / height for n in range(1, plateau)]
    deepest = max(range(len(bends)), key=bends.__getitem__)
    return CurveBends(deepest + 1 if bends[deepest] >= _BEND else None, plateau)


def in_words(found: Curves, policy: str, experts_bytes: int | None = None) -> str:
    """Return a sentence that says how many misses more memory saves, such as

        auto: from 5 % to 30 % of the experts in memory saves 70 misses a token (28 for every 10 %, 3.00 GiB); from ...

    `experts_bytes`: the size of all experts; None if the size is unknown.
    """
    turn, misses, shares = turns(found, policy), found.per_step(policy), found.shares
    unit, rest = "token" if found.steps_are_tokens else "step", misses[turn.plateau] - misses[-1]
    if turn.plateau == 0:
        return f"{policy}: {_percent(shares[0])} of the experts do; all of them save {rest:.2g} misses a {unit}"
    places = [0, turn.plateau] if turn.knee is None else [0, turn.knee, turn.plateau]
    size = f", {format_bytes(experts_bytes / 10)}" if experts_bytes else ""
    texts = []
    for begin, end in pairwise(places):
        span, saved = f"from {_percent(shares[begin])} to {_percent(shares[end])}", misses[begin] - misses[end]
        slope = f"{saved / (shares[end] - shares[begin]) / 10:.3g}"
        if begin == 0:
            texts.append(
                f"{span} of the experts in memory saves {saved:.3g} misses a {unit} ({slope} for every 10 %{size})"
            )
        else:
            texts.append(f"{span}, {saved:.3g} ({slope})")
    if turn.plateau < len(misses) - 1:
        texts.append(f"beyond {_percent(shares[turn.plateau])}, {rest:.2g} in all")
    return f"{policy}: {'; '.join(texts)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"
