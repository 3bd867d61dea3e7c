"""Which worker of a cluster computes which of the missing experts, and which the main machine loads itself.

Experts are stateless, so wherever one is computed the result is the same; a placement decides time alone. Two rules:
*finish*, ours: the most important first, each where it will be done earliest, so that who holds it is preferred; and
*round-robin* (OD-MoE, section 3.1): workers form groups of as many as a token chooses, layers take turns at the groups,
and the main machine loads nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import inf
from typing import NamedTuple

from smoe.expert import EXACT, ExpertKey
from smoe.policy.balance import importance
from smoe.policy.plan import Serve
from smoe.routing import Routing

PLACEMENT = ("finish", "round-robin")
"""Where each expert is done earliest; or by turns, as the paper has it."""


_HARDLY = 0.1
"""The share of a load by which a later end counts as equal."""


class WorkerView(NamedTuple):
    """A worker, as it is known when a layer is planned. Times in seconds."""

    unit: int
    """Its number in plans (`Serve.unit`)."""
    holds: Container[ExpertKey]
    """The experts in its memory, as far as is known."""
    load: float
    """Seconds to load one expert."""
    expert: float
    """Seconds to compute one expert for few rows."""
    row: float
    """Seconds to compute each of many rows."""
    hop: float
    """There and back."""
    busy: float = 0.0
    """Seconds until it has read what was announced before."""
    brought_at: float = -inf
    """When it was last given something to bring in: of equal ones all are to have what their slots hold of late."""
    most_rows: float = inf
    """The most rows of one expert that it computes."""


class Placement(NamedTuple):
    """How the misses of one layer are shared out."""

    method: str
    """One of `PLACEMENT`."""
    order: str
    """Which experts are the most important (`EngineConfig.balance_order`)."""
    workers: Sequence[WorkerView]
    """The workers in the order of their numbers; empty: everything is loaded here."""
    here_load: float
    """Seconds to load one expert here; infinite: none is."""
    here_under_way: float
    """Seconds that loads here still take before another can begin."""
    turn: int
    """Which layer this is, counted over those with experts."""
    here_costs_later: float = 0.0
    """Seconds that a load here is worse by than it seems, as what is loaded here is forgotten sooner than what workers
    load, and will be missed again; below zero: better."""

    @property
    def takes_all(self) -> bool:
        """Whether nothing is to be loaded here."""
        return bool(self.workers) and self.here_load == inf

    def split(self, missing: Sequence[Serve], routing: Routing) -> tuple[list[Serve], list[Serve]]:
        """(to be loaded here, most important first; to be computed by workers)."""
        if not self.workers:
            return list(missing), []
        ranked = sorted(missing, key=lambda serve: importance(serve, routing, self.order))
        units = self.units(ranked)
        given = [serve._replace(unit=units[serve.key]) for serve in ranked if serve.key in units]
        return [serve for serve in ranked if serve.key not in units], given

    def split_prompt(self, missing: Sequence[Serve], ahead: int) -> dict[ExpertKey, int]:
        """The experts of a prompt that workers compute, and which worker; `ahead` loads come here in any case. Those of
        the most tokens are placed first."""
        ranked = sorted(missing, key=lambda serve: (-len(serve.routes), serve.key))
        waits = self.here_under_way + ahead * _finite(self.here_load)
        return self._replace(here_under_way=waits, here_costs_later=0.0).units(ranked)

    def units(self, ranked: Sequence[Serve]) -> dict[ExpertKey, int]:
        """Who computes each, but for those that are loaded here."""
        if not self.workers:
            return {}
        return self._by_turns(ranked) if self.method == "round-robin" else self._by_finish(ranked)

    def _by_turns(self, ranked: Sequence[Serve]) -> dict[ExpertKey, int]:
        keys = [serve.key for serve in ranked if serve.key[2] == EXACT]
        return by_turns(keys, len(keys), self.turn, self.workers)

    def _by_finish(self, ranked: Sequence[Serve]) -> dict[ExpertKey, int]:
        """Greedy: each in its turn to the machine that finishes it first, what was given before included. A worker
        computes what it holds, and reads what it does not meanwhile."""
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
    """Who of the group whose turn it is computes which of a layer's experts, of which a token chooses `size`.

    A machine that holds one, or to which it was announced, keeps it; others are dealt out in ascending order, no more
    to any than is fair. Of more experts than a token chooses, the last are spares: for the workers that belong to no
    group, who keep what they hold, too.
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
    """The workers whose turn it is: as many groups of `size` as there are, one after the other; what is left over is
    spare. All of them where they are too few for one group."""
    groups = len(workers) // size if size else 0
    if groups == 0:
        return list(workers)
    begin = turn % groups * size
    return list(workers[begin : begin + size])


def _finite(seconds: float) -> float:
    return 0.0 if seconds == inf else seconds
