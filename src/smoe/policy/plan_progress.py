"""Executes plans on the slot table and the eviction policy, which change together as loads end and experts are
computed.

For each plan, the caller calls `adopt` once, `served` after every computed expert, and `arrive` or `fail` when a load
ends, at any time. `Progress` calls `begin(load)` when the slot of a load is free.

Engine and simulators execute plans only through this class, so their decisions cannot differ. Only the function `begin`
is their own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.base import Eviction
from smoe.policy.plan import LayerPlan, Load, Promotion, Serve
from smoe.policy.residency import SlotPool, SlotTable
from smoe.routing import Phase, Routing


class Progress:
    """Executes the plans of one device, one after the other. Each load and each serve costs O(1)."""

    def __init__(self, table: SlotTable, eviction: Eviction, begin: Callable[[Load], None]) -> None:
        self.table = table
        self.eviction = eviction
        self._begin = begin
        self._queue: deque[Load] = deque()
        """Loads of the running layer that wait for their slots, followed by prefetches."""
        self._promoted: set[ExpertKey] = set()
        """Prefetched copies that the running layer has promoted and not computed yet."""
        self._staying: dict[ExpertKey, Promotion] = {}
        """Copies that replace a resident after the running layer has computed them."""
        self._layer: float = -math.inf
        """The layer of the last plan."""
        self._expected: set[ExpertKey] = set()
        """The copies that were prefetched during the current pass over the layers. Before the first `look_through` of a
        pass, those that were prefetched during the previous pass."""

    def adopt(self, plan: LayerPlan) -> None:
        """Start a plan: make the promotions that are due now, store the later promotions, and begin loads in their
        order."""
        self._layer = plan.layer
        self._staying = {promotion.key: promotion for promotion in plan.promotions if promotion.after}
        for promotion in plan.promotions:
            if not promotion.after:
                self._promote(promotion)
        self._queue = deque(plan.loads)
        self._issue(0)

    def prefetch(self, loads: Sequence[Load]) -> None:
        """Add prefetches to the queue, after all loads of the running layer."""
        self._expected.update(load.key for load in loads if not load.keep)
        self._queue.extend(loads)
        self._issue(0)

    def look_through(self, routing: Routing) -> tuple[list[ExpertKey], list[ExpertKey]]:
        """Return (the staged copies that `routing` uses, the staged copies to drop). It is called before the layer is
        planned and costs O(staging slots).

        A copy that this pass of decode has prefetched for a later layer is in neither list: it stays until its layer
        runs. Copies of wrong predictions and of an earlier pass are dropped. A prefill needs the staging slots, so all
        copies that its layer does not use are dropped.
        """
        if routing.phase is Phase.PREFILL or routing.layer <= self._layer:  # a pass runs its layers in ascending order
            self._expected.clear()
        layer, chosen = routing.layer, {expert for row in routing.top_k_index for expert in row}

        def is_wanted(key: ExpertKey) -> bool:
            if key[0] != layer or key[1] not in chosen:
                return False
            return key[2] == EXACT or (key[1] in routing.low and not self.table.is_at_hand((layer, key[1], EXACT)))

        wanted = [key for key in self.table.staged if is_wanted(key)]
        stay = {*wanted, *(key for key in self.table.staged if key[0] > layer and key in self._expected)}
        return wanted, [key for key in self.table.staged if key not in stay]

    def arrive(self, key: ExpertKey) -> None:
        """Record that the load of `key` has ended. A promoted copy counts as resident for the eviction policy only
        after its serve."""
        self.table.arrive(key)
        if key not in self.table.staged and key not in self._promoted:
            self.eviction.insert(key)

    def fail(self, key: ExpertKey) -> None:
        """Record that the load of `key` has failed or was cancelled."""
        self._promoted.discard(key)
        self.table.fail(key)

    def served(self, serve: Serve, computed: int) -> None:
        """Record that an expert was computed. `computed`: the number of its serve in the plan, from 1. The expert's
        copy becomes resident or leaves its slot, and loads that waited for the slot begin."""
        key = serve.key
        if key in self._staying:
            self._promote(self._staying.pop(key))
        if key in self.table.staged:
            self.table.release(key)
        elif key in self._promoted:
            self._promoted.remove(key)
            self.eviction.insert(key)
        if self._queue:
            self._issue(computed)

    def withdraw(self, pool: SlotPool, count: int) -> list[int]:
        """Take `count` cache slots of a pool out of use: first free slots, then the slots of the least valuable
        residents. Return the slots. It must be called between plans, when no load is in flight."""
        residents = [key for key in self.table.cached() if self.table.pool_of(key) is pool]
        if count > len(pool.free_cache):
            ranked = self.eviction.of_layer(residents[0][0])
            for key in ranked.victims(count - len(pool.free_cache), ()):
                self.table.discard(key)
                self.eviction.remove(key)
        slots = list(pool.free_cache)[:count]
        assert len(slots) == count, (count, slots)
        for slot in slots:
            pool.withdraw(slot)
        return slots

    def recover(self) -> None:
        """Make slot table and eviction policy consistent after an error or an interrupt at any point, when no load is
        in flight. Only completely loaded experts stay."""
        self._queue.clear()
        self._promoted.clear()
        self._staying.clear()
        self._expected.clear()
        self.table.settle()
        resident, believed = self.table.ready.keys(), self.eviction.residents()
        for key in sorted(believed - resident):
            self.eviction.remove(key)
        for key in sorted(resident - believed):
            self.eviction.insert(key)

    def reset(self, eviction: Eviction) -> None:
        """Empty all slots and use another eviction policy from now on."""
        self.recover()
        self.table.clear()
        self.eviction = eviction

    def _promote(self, promotion: Promotion) -> None:
        self.table.promote(promotion)
        if promotion.victim is not None:
            self.eviction.remove(promotion.victim)
        self._promoted.add(promotion.key)

    def _issue(self, computed: int) -> None:
        """Begin the queued loads whose slots are free after `computed` serves of the plan."""
        queue = self._queue
        while queue and queue[0].after <= computed:
            load = queue.popleft()
            self.table.begin(load)
            if load.victim is not None:
                self.eviction.remove(load.victim)
            self._begin(load)


def carry_out(plan: LayerPlan, table: SlotTable, eviction: Eviction) -> None:
    """Execute a plan whose loads take no time."""
    progress = Progress(table, eviction, lambda load: progress.arrive(load.key))
    progress.adopt(plan)
    for computed, serve in enumerate(plan.serves, start=1):
        progress.served(serve, computed)
