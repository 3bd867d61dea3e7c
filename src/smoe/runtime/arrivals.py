"""The loads in flight: their slots, which may start now, and which have finished.

This module is between the plan's loads and the computation that waits for them. Slot table, eviction policy and
transfers are changed together, here only, so that they agree after an error at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from smoe.compute.expert_math import ExpertMath, Weights
from smoe.expert import EXACT, ExpertKey
from smoe.memory.arena import Arena
from smoe.memory.reading_threads import Ticket, TicketState, Transfers
from smoe.memory.store import ExpertStore
from smoe.metrics import Counters
from smoe.policy.eviction.base import Eviction
from smoe.policy.plan import LayerPlan, Load, LoadReason, Serve
from smoe.policy.plan_progress import Progress
from smoe.policy.residency import SlotPool, SlotTable
from smoe.routing import Phase, Routing


class Arrivals:
    """The loads of one device. Only the computing thread may use it."""

    def __init__(
        self,
        *,
        stores: Mapping[int, ExpertStore],
        table: SlotTable,
        eviction: Eviction,
        transfers: Transfers,
        arena: Arena,
        math: Mapping[tuple[int, int], ExpertMath],
        clock: Callable[[], float],
    ) -> None:
        """`stores`: the stored experts, by format; `math`: the expert arithmetic, by layer and format."""
        self.table = table
        self.transfers = transfers
        self.counters = Counters()
        self.tickets: dict[ExpertKey, Ticket] = {}
        """Submitted loads whose end has not been recorded in the slot table."""
        self.stores = stores
        self._experts = len(stores[EXACT].keys())
        self._arena = arena
        self._math = math
        self._clock = clock
        self._progress = Progress(table, eviction, self._begin)
        self._weights: list[Weights | None] = [None] * table.slots
        self._views: dict[tuple[int, int], Weights] = {}
        self._flowing: list[Ticket] = []
        """Loads recorded as arrived while their bytes are still being copied: the device waits for them, no thread
        needs to."""

    @property
    def eviction(self) -> Eviction:
        return self._progress.eviction

    @property
    def slots(self) -> int:
        """The number of cache and staging slots."""
        return len(self._weights)

    @property
    def is_all_here(self) -> bool:
        """Whether every expert is resident, so that nothing is read. Always false where there are low copies, which
        would be unused with such a budget."""
        return not self.table.has_low and len(self.table.ready) == self._experts

    @property
    def running(self) -> float:
        """The number of running loads; each counts half, because half of it is done on average."""
        return sum(0.5 for ticket in (*self.tickets.values(), *self._flowing) if ticket.state is TicketState.RUNNING)

    def awaited(self, plan: LayerPlan) -> list[Ticket]:
        """Return the unfinished loads that the plan's serves wait for."""
        found = (self.tickets.get(serve.key) for serve in plan.serves if serve.waits)
        return [ticket for ticket in found if ticket is not None and not ticket.is_over]

    def reset(self, eviction: Eviction) -> None:
        """Empty all slots and reset statistics and counters."""
        self.recover()
        self._progress.reset(eviction)
        self.counters = Counters()
        self.transfers.reset()

    def forget(self) -> None:
        """Drop all references to the slots' memory. No load may be in flight, and none may follow."""
        self._weights = [None] * len(self._weights)
        self._views.clear()

    def adopt(self, plan: LayerPlan) -> None:
        """Start a plan: its loads begin in their order, as their slots become free."""
        self._progress.adopt(plan)

    def prefetch(self, loads: Sequence[Load]) -> None:
        """Queue prefetches for later layers, after all loads of the running layer."""
        self.counters.prefetches += len(loads)
        self._progress.prefetch(loads)

    def bring(self, loads: Sequence[Load]) -> None:
        """Queue loads into cache slots, after all loads of the running layer."""
        self._progress.prefetch(loads)

    def preload(self) -> None:
        """Load experts into free slots, in order and after all loads on demand."""
        keys, here = self.stores[EXACT].keys(), self.table.ready.keys() | self.table.inflight.keys()
        missing = [key for key in ((*at, EXACT) for at in keys) if key not in here]
        free = {pool: iter(list(pool.free_cache)) for pool in self.table.pools}
        slots = ((key, next(free[self.table.pool_of(key)], None)) for key in missing)
        self._progress.prefetch(
            [Load(key, slot, None, True, LoadReason.PREFETCH, 0) for key, slot in slots if slot is not None]
        )

    def resize(self, pool: SlotPool, cache_slots: int) -> list[int]:
        """Change the number of cache slots of a pool, between passes. Return the slots that are no longer used; their
        content is lost."""
        count = pool.cache_slots - cache_slots
        if count <= 0:
            pool.give(-count)
            return []
        if count > len(pool.free_cache):
            self._end_loads(pool)
        slots = self._progress.withdraw(pool, count)
        for slot in slots:
            self._weights[slot] = None
        return slots

    def _end_loads(self, pool: SlotPool) -> None:
        """End all loads into a pool's cache slots, so that each slot is free or holds a resident."""
        for key, ticket in list(self.tickets.items()):
            if self.table.pool_of(key) is pool and key not in self.table.staged:
                if not self.transfers.cancel(ticket) and not ticket.is_over:
                    ticket.join()
                self._close(key, ticket)

    def _begin(self, load: Load) -> None:
        self._weights[load.slot] = self._bind(load)
        self.tickets[load.key] = self.transfers.submit(load)

    def _bind(self, load: Load) -> Weights:
        """Return the weights of the load as views of its slot; made once for each slot and layout."""
        layer, expert, form = load.key
        placement = self.stores[form].placement(layer, expert)
        key = (load.slot, placement.layout)  # a slot's format never changes
        weights = self._views.get(key)
        if weights is None:
            weights = self._views[key] = self._math[layer, form].bind(self._arena, load.slot, placement.parts)
        return weights

    def slots_of(self, math: ExpertMath, layer: int, count: int) -> list[Weights]:
        """Return `count` slots with their content as weights of the layer, in turns; for measurements."""
        pool, parts = self.table.pool(layer), self.stores[EXACT].placement(layer, 0).parts
        slots = range(pool.first, pool.end)
        return [math.bind(self._arena, slots[n % len(slots)], parts) for n in range(count)]

    def _arrive(self, key: ExpertKey) -> Weights:
        """Return the weights of a load in flight after waiting for it; where possible, only the device waits."""
        ticket = self.tickets[key]
        if not ticket.is_over:
            self.transfers.urge(ticket)
            started = self._clock()
            ticket.join()
            self.counters.wait_seconds += self._clock() - started
        if not ticket.is_over:
            assert ticket.hold is not None
            ticket.hold()
        self._close(key, ticket)
        if ticket.error is not None:
            raise ticket.error
        return self.ready(key)

    def _close(self, key: ExpertKey, ticket: Ticket) -> None:
        """Record that a load has ended, or (on a GPU) that only the device still waits for it."""
        del self.tickets[key]
        if ticket.state in (TicketState.FAILED, TicketState.CANCELLED):
            self._progress.fail(key)
            return
        self._progress.arrive(key)
        if not ticket.is_over:
            self._flowing.append(ticket)

    def collect(self) -> None:
        """Record prefetches that have ended since the last layer; a failed one is loaded again on demand.

        The host does not wait for prefetches that are already on the device. If a load that only the device waits for
        has failed, its error is raised, because results already used it.
        """
        if self._flowing:
            for ticket in self._flowing:
                if ticket.error is not None:
                    raise ticket.error
            self._flowing = [ticket for ticket in self._flowing if not ticket.is_over]
        if self.tickets:
            for key, ticket in list(self.tickets.items()):
                if ticket.is_over:
                    self._close(key, ticket)

    def drop_stale(self, routing: Routing) -> None:
        """Drop prefetched copies that `routing` does not use (`Progress.look_through`).

        In decode, an unused copy that is still being read stays, because its slot is not needed yet, and is dropped at
        a later layer. A prefill needs these slots, so it waits for the read.
        """
        wanted, stale = self._progress.look_through(routing)
        self.counters.prefetches_used += len(wanted)
        for key in stale:
            ticket = self.tickets.get(key)
            if ticket is not None:
                if not self.transfers.cancel(ticket) and not ticket.is_over:
                    if routing.phase is Phase.DECODE:
                        continue
                    ticket.join()  # the next load into the slot must follow it
                self._close(key, ticket)
            if key in self.table.ready:
                self.table.release(key)

    def recover(self) -> None:
        """Restore consistency after an error or an interrupt at any point: no load is in flight, only complete experts
        stay."""
        self.transfers.drain()
        for ticket in self._flowing:
            if ticket.error is not None:
                self.table.ready.pop(ticket.load.key, None)
        self._flowing.clear()
        self.tickets.clear()
        self._progress.recover()

    def weights_of(self, serve: Serve) -> Weights:
        return self.ready(serve.key) if serve.key in self.table.ready else self._arrive(serve.key)

    def ready(self, key: ExpertKey) -> Weights:
        weights = self._weights[self.table.ready[key]]
        assert weights is not None, key
        return weights

    def served(self, serve: Serve, computed: int) -> None:
        """Record that a serve has been computed: its staged copy leaves or stays, and loads that waited for its slot
        start."""
        self._progress.served(serve, computed)
