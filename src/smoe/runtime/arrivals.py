"""Loads on their way: the slot of each, which may start now, which have finished.

The middle between the plan's loads and the computing that waits for them. The slot table, the eviction policy and the
transfers change together here and nowhere else, so that an error anywhere leaves them in agreement.
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
    """The loads of one device. Used by the computing thread only."""

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
        """`stores` by format, `math` by layer and format."""
        self.table = table
        self.transfers = transfers
        self.counters = Counters()
        self.tickets: dict[ExpertKey, Ticket] = {}
        """What has been submitted and whose end has not been booked."""
        self.stores = stores
        self._arena = arena
        self._math = math
        self._clock = clock
        self._progress = Progress(table, eviction, self._begin)
        self._weights: list[Weights | None] = [None] * table.slots
        self._views: dict[tuple[int, int], Weights] = {}
        self._flowing: list[Ticket] = []
        """Taken in while their bytes are still on their way: the device waits for them, no thread needs to."""

    @property
    def eviction(self) -> Eviction:
        return self._progress.eviction

    @property
    def slots(self) -> int:
        """Cache and staging slots together."""
        return len(self._weights)

    @property
    def running(self) -> float:
        """Loads that the link still has to do for what runs now: half of each is taken to be done."""
        return sum(0.5 for ticket in (*self.tickets.values(), *self._flowing) if ticket.state is TicketState.RUNNING)

    def awaited(self, plan: LayerPlan) -> list[Ticket]:
        """The loads that the plan's serves are still waiting for."""
        found = (self.tickets.get(serve.key) for serve in plan.serves if serve.waits)
        return [ticket for ticket in found if ticket is not None and not ticket.is_over]

    def reset(self, eviction: Eviction) -> None:
        """Empty slots, no statistics, no counts."""
        self.recover()
        self._progress.reset(eviction)
        self.counters = Counters()
        self.transfers.reset()

    def forget(self) -> None:
        """Let go of the slots' memory; nothing may be under way, and nothing is asked for any more."""
        self._weights = [None] * len(self._weights)
        self._views.clear()

    def adopt(self, plan: LayerPlan) -> None:
        """Start a plan: its loads, in their order, as their slots get free."""
        self._progress.adopt(plan)

    def prefetch(self, loads: Sequence[Load]) -> None:
        """Bring in what a later layer may want, after all that the running layer waits for."""
        self.counters.prefetches += len(loads)
        self._progress.prefetch(loads)

    def bring(self, loads: Sequence[Load]) -> None:
        """Bring in what stays, behind all that is asked for."""
        self._progress.prefetch(loads)

    def preload(self) -> None:
        """Bring in experts while slots are free, in order and behind all that is asked for meanwhile."""
        keys, here = self.stores[EXACT].keys(), self.table.ready.keys() | self.table.inflight.keys()
        missing = [key for key in ((*at, EXACT) for at in keys) if key not in here]
        free = {pool: iter(list(pool.free_cache)) for pool in self.table.pools}
        slots = ((key, next(free[self.table.pool_of(key)], None)) for key in missing)
        self._progress.prefetch(
            [Load(key, slot, None, True, LoadReason.PREFETCH, 0) for key, slot in slots if slot is not None]
        )

    def resize(self, pool: SlotPool, cache_slots: int) -> list[int]:
        """Between passes: have a pool use so many cache slots. Returns those that it uses no longer; what was there is
        lost."""
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
        """Nothing is under way to a pool's cache slots any more: each is free or holds a resident."""
        for key, ticket in list(self.tickets.items()):
            if self.table.pool_of(key) is pool and key not in self.table.staged:
                if not self.transfers.cancel(ticket) and not ticket.is_over:
                    ticket.join()
                self._close(key, ticket)

    def _begin(self, load: Load) -> None:
        self._weights[load.slot] = self._bind(load)
        self.tickets[load.key] = self.transfers.submit(load)

    def _bind(self, load: Load) -> Weights:
        """The weights that the load will bring, as views; made once for a slot and layout."""
        layer, expert, form = load.key
        placement = self.stores[form].placement(layer, expert)
        key = (load.slot, placement.layout)  # a slot is of one format for ever
        weights = self._views.get(key)
        if weights is None:
            weights = self._views[key] = self._math[layer, form].bind(self._arena, load.slot, placement.parts)
        return weights

    def _arrive(self, key: ExpertKey) -> Weights:
        """Take in a copy that is under way: wait for it, or have the device wait where it can."""
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
        """Book the end of a load, or that the device alone waits for it."""
        del self.tickets[key]
        if ticket.state in (TicketState.FAILED, TicketState.CANCELLED):
            self._progress.fail(key)
            return
        self._progress.arrive(key)
        if not ticket.is_over:
            self._flowing.append(ticket)

    def collect(self) -> None:
        """Take in the prefetches that have ended since the last layer; a failed one is tried again on demand.

        Nothing waits for them: they are on the device. If a load that the device waits for has failed, its
        error is raised, because results already used it.
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
        """Forget what was prefetched and is not wanted (`Progress.look_through`).

        A wrong guess that is being read is left alone in decode, where its slot is not needed now, and dropped at a
        later layer; a prefill streams through these slots and waits for it.
        """
        wanted, stale = self._progress.look_through(routing)
        self.counters.prefetches_used += len(wanted)
        for key in stale:
            ticket = self.tickets.get(key)
            if ticket is not None:
                if not self.transfers.cancel(ticket) and not ticket.is_over:
                    if routing.phase is Phase.DECODE:
                        continue
                    ticket.join()  # what is loaded into the slot next is copied behind it
                self._close(key, ticket)
            if key in self.table.ready:
                self.table.release(key)

    def recover(self) -> None:
        """After an error or an interrupt, wherever it struck: nothing is under way, only complete experts stay."""
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
        """A serve has been computed: a passing expert leaves or stays, loads that waited for a slot start."""
        self._progress.served(serve, computed)
