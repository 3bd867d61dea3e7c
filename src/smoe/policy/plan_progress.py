"""The execution of plans: changes the slot table and the eviction policy together, as loads end and serves are done.

    adopt ----> begin ... begin | served: promote, release, begin ... | served ... | arrive, or fail, at any time

Engine and simulators execute plans only by this class, so their decisions cannot differ. Only the loads are their own:
`begin` is called with each load when its slot is free.
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
    """Executes the plans of one device, one after the other. Each load and serve costs O(1)."""

    def __init__(self, table: SlotTable, eviction: Eviction, begin: Callable[[Load], None]) -> None:
        self.table = table
        self.eviction = eviction
        self._begin = begin
        self._queue: deque[Load] = deque()
        """Loads of the running layer whose slots are still in use, followed by prefetches."""
        self._promoted: set[ExpertKey] = set()
        """Prefetched copies of the running layer that stay, before their serve."""
        self._staying: dict[ExpertKey, Promotion] = {}
        """Copies of the running layer that replace a resident after their serve."""
        self._layer: float = -math.inf
        """The layer of the last plan."""
        self._expected: set[ExpertKey] = set()
        """The copies that the current pass has prefetched; before its first `look_through`, those of the last pass."""

    def adopt(self, plan: LayerPlan) -> None:
        """Start a plan: apply due promotions, remember later ones, begin loads in their order."""
        self._layer = plan.layer
        self._staying = {promotion.key: promotion for promotion in plan.promotions if promotion.after}
        for promotion in plan.promotions:
            if not promotion.after:
                self._promote(promotion)
        self._queue = deque(plan.loads)
        self._issue(0)

    def prefetch(self, loads: Sequence[Load]) -> None:
        """Queue prefetches after all loads of the running layer."""
        self._expected.update(load.key for load in loads if not load.keep)
        self._queue.extend(loads)
        self._issue(0)

    def look_through(self, routing: Routing) -> tuple[list[ExpertKey], list[ExpertKey]]:
        """Return the staged copies that `routing` uses and those to drop, before it is planned.

        Copies that a decode step has prefetched for later layers are neither: they stay until their layer runs. Wrong
        predictions and copies of an earlier pass are dropped. A prefill needs the staging slots, so it drops everything
        that its layer does not use. O(staging slots).
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
        """Record that a load has ended. A promoted copy becomes a resident after its serve only."""
        self.table.arrive(key)
        if key not in self.table.staged and key not in self._promoted:
            self.eviction.insert(key)

    def fail(self, key: ExpertKey) -> None:
        """Record that a load has failed or was cancelled."""
        self._promoted.discard(key)
        self.table.fail(key)

    def served(self, serve: Serve, computed: int) -> None:
        """Record that the plan's `computed`-th serve is done: its copy leaves or stays, and waiting loads begin."""
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
        """Take `count` cache slots out of use, between plans: free ones first, then those of the least valuable
        residents. Return the slots. All cache slots of the pool must be free or hold residents."""
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
        """Restore consistency after an error or an interrupt at any point, with no load in flight: only complete
        experts stay."""
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
        """Empty all slots and replace the eviction policy."""
        self.recover()
        self.table.clear()
        self.eviction = eviction

    def _promote(self, promotion: Promotion) -> None:
        self.table.promote(promotion)
        if promotion.victim is not None:
            self.eviction.remove(promotion.victim)
        self._promoted.add(promotion.key)

    def _issue(self, computed: int) -> None:
        """Begin the loads whose slots are free after `computed` serves."""
        queue = self._queue
        while queue and queue[0].after <= computed:
            load = queue.popleft()
            self.table.begin(load)
            if load.victim is not None:
                self.eviction.remove(load.victim)
            self._begin(load)


def carry_out(plan: LayerPlan, table: SlotTable, eviction: Eviction) -> None:
    """Apply a plan whose loads take no time."""
    progress = Progress(table, eviction, lambda load: progress.arrive(load.key))
    progress.adopt(plan)
    for computed, serve in enumerate(plan.serves, start=1):
        progress.served(serve, computed)
