"""Decides which worker of a cluster computes which missing expert, and which experts the coordinator loads itself.

The result of an expert does not depend on the machine, so a placement affects time only. There are two rules. *finish*
is smoe's own: each expert, in order of importance, goes to the machine that will finish it first, usually one that has
it in memory. *round-robin* is OD-MoE's (section 3.1): workers form groups of K, layers use the groups in turn, and the
coordinator loads nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import inf
from typing import NamedTuple

from smoe.expert import EXACT, ExpertKey
from smoe.policy.load_or_compute import importance
from smoe.policy.plan import Serve
from smoe.routing import Routing

PLACEMENT = ("finish", "round-robin")
"""finish: each expert goes to the machine that finishes it first; round-robin: groups of workers take turns, as in the
paper."""


_HARDLY = 0.1
"""Two times at which machines finish count as equal if they differ by less than this fraction of a load's time."""


class WorkerView(NamedTuple):
    """The coordinator's numbers about one worker at the time when a layer is planned. Times are in seconds."""

    unit: int
    """The worker's number in plans (`Serve.unit`)."""
    holds: Container[ExpertKey]
    """The experts in the worker's memory, as far as the coordinator knows."""
    load: float
    """Seconds to load one expert."""
    expert: float
    """Seconds to compute one expert for few rows."""
    row: float
    """Seconds per row to compute an expert for many rows (tokens)."""
    hop: float
    """Seconds for a request and its reply to travel."""
    busy: float = 0.0
    """Seconds until the worker has completed the loads that were announced to it earlier."""
    brought_at: float = -inf
    """The time at which a load was last assigned to the worker. Of equal workers, the one with the earliest time gets
    the load."""
    most_rows: float = inf
    """The maximum number of rows of one expert that the worker computes."""


class Placement(NamedTuple):
    """The rule and the numbers by which one layer's missing experts are divided between the coordinator and its
    workers."""

    method: str
    """One of `PLACEMENT`: how missing experts are assigned."""
    order: str
    """One of `BALANCE_ORDER`: which missing experts are the most important."""
    workers: Sequence[WorkerView]
    """The workers in the order of their numbers; if empty, the coordinator loads all experts."""
    here_load: float
    """Seconds for the coordinator to load one expert; infinite if it should load none."""
    here_under_way: float
    """Seconds until the coordinator's loads in flight have ended."""
    turn: int
    """The layer's number in the order in which layers run, which continues from token to token and counts layers with
    experts only."""
    here_costs_later: float = 0.0
    """Seconds by which a load on the coordinator is worse than its duration, because experts loaded there are evicted
    sooner than on workers and are missed again. Negative if such a load is better."""

    @property
    def takes_all(self) -> bool:
        """Whether workers compute all missing experts, so that the coordinator loads none."""
        return bool(self.workers) and self.here_load == inf

    def split(self, missing: Sequence[Serve], routing: Routing) -> tuple[list[Serve], list[Serve]]:
        """Return (the experts that the coordinator loads, most important first; the experts for workers, each with its
        worker), for the missing experts of a decode step."""
        if not self.workers:
            return list(missing), []
        ranked = sorted(missing, key=lambda serve: importance(serve, routing, self.order))
        units = self.units(ranked)
        given = [serve._replace(unit=units[serve.key]) for serve in ranked if serve.key in units]
        return [serve for serve in ranked if serve.key not in units], given

    def split_prompt(self, missing: Sequence[Serve], ahead: int) -> dict[ExpertKey, int]:
        """Return {expert: worker} of a prompt's missing experts that workers compute. Experts with most tokens are
        placed first. `ahead`: the number of loads by the coordinator that are necessary in any case."""
        ranked = sorted(missing, key=lambda serve: (-len(serve.routes), serve.key))
        waits = self.here_under_way + ahead * _finite(self.here_load)
        return self._replace(here_under_way=waits, here_costs_later=0.0).units(ranked)

    def units(self, ranked: Sequence[Serve]) -> dict[ExpertKey, int]:
        """Return {expert: worker} for the experts in `ranked`, most important first. Experts that the coordinator loads
        are left out."""
        if not self.workers:
            return {}
        return self._by_turns(ranked) if self.method == "round-robin" else self._by_finish(ranked)

    def _by_turns(self, ranked: Sequence[Serve]) -> dict[ExpertKey, int]:
        keys = [serve.key for serve in ranked if serve.key[2] == EXACT]
        return by_turns(keys, len(keys), self.turn, self.workers)

    def _by_finish(self, ranked: Sequence[Serve]) -> dict[ExpertKey, int]:
        """Assign the missing experts, one after the other, each to the machine that would finish it first, given the
        earlier assignments (a greedy algorithm). A worker can compute an expert in its memory while it reads others."""
        read, done = [view.hop + view.busy for view in self.workers], [view.hop for view in self.workers]
        brought_at = [view.brought_at for view in self.workers]
        here, found = self.here_under_way, dict[ExpertKey, int]()
        for serve in sorted(ranked, key=lambda serve: not any(serve.key in view.holds for view in self.workers)):
            rows = len(serve.routes)
            there = [
                view.hop if serve.key in view.holds else end + view.load
                for end, view in zip(read, self.workers, strict=True)
            ]
            ends = [
                max(end, ready) + max(view.expert, rows * view.row) if rows <= view.most_rows else inf
                for end, ready, view in zip(done, there, self.workers, strict=True)
            ]
            first = min(range(len(ends)), key=lambda n: ends[n])
            as_soon = ends[first] + _HARDLY * self.workers[first].load
            equal = [n for n, end in enumerate(ends) if end <= as_soon]
            best = min(equal, key=lambda n: (brought_at[n], ends[n], done[n]))
            is_sooner_here = here + self.here_load + self.here_costs_later < ends[best]
            if serve.key[2] != EXACT or is_sooner_here or ends[best] == inf:
                here += _finite(self.here_load)
                continue
            if serve.key not in self.workers[best].holds:
                read[best], brought_at[best] = there[best], inf
            done[best] = ends[best]
            found[serve.key] = self.workers[best].unit
        return found


def by_turns(keys: Sequence[ExpertKey], size: int, turn: int, workers: Sequence[WorkerView]) -> dict[ExpertKey, int]:
    """Return the worker of each of a layer's experts, by round-robin placement. `size`: K, the number of experts that a
    token chooses. `turn`: the layer's number (`Placement.turn`), which selects the group of workers.

    A worker of the group that holds an expert, or to which it was announced, gets this expert. The others are assigned
    in ascending order, evenly to the workers. Experts after the first `size` of `keys` are extra predictions, and go to
    workers outside of all groups.
    """
    units = [view.unit for view in workers]
    members = group(turn, size, units)
    idle = units[len(units) // size * size :] if 0 < size <= len(units) else []
    holds = {view.unit: view.holds for view in workers}
    dealt, found = dict.fromkeys(units, 0), dict[ExpertKey, int]()
    for ours, whose in ((keys[:size], members), (keys[size:], idle or members)):
        fair = dealt[whose[0]] - (-len(ours) // len(whose))
        for key in sorted(ours):
            holder = next((unit for unit in [*whose, *idle] if key in holds[unit] and dealt[unit] < fair), None)
            if holder is not None:
                found[key] = holder
                dealt[holder] += 1
        for key in sorted(key for key in ours if key not in found):
            found[key] = min(whose, key=lambda unit: (dealt[unit], whose.index(unit)))
            dealt[found[key]] += 1
    return found


def group(turn: int, size: int, workers: Sequence[int]) -> list[int]:
    """Return the group of workers that computes layer number `turn` in round-robin placement. A group consists of
    `size` consecutive workers; the remaining workers are in no group. If there are too few workers for one group,
    return all workers."""
    groups = len(workers) // size if size else 0
    if groups == 0:
        return list(workers)
    begin = turn % groups * size
    return list(workers[begin : begin + size])


def _finite(seconds: float) -> float:
    return 0.0 if seconds == inf else seconds
