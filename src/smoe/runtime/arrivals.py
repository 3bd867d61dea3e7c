"""Tracks the loads in flight: starts each load when its slot is free, and records in the slot table when it has ended.

A plan names the loads, and the computation waits for them; this module connects both. Only this module changes the slot
table, the eviction policy and the transfers, and always all three, so that they agree after an error at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

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
    """Starts the loads into the slots of one device, and records their ends in the slot table. Only the computing
    thread may call its methods."""

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
        """`stores`: the stored experts, by format; `math`: the arithmetic of experts, by (layer, format); `clock`
        returns seconds."""
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
        """Loads that the slot table lists as arrived while their bytes are still being copied: the device waits for
        them, and no thread has to."""
        self._preloads = False
        """Whether free slots are to be filled with experts that no step has used yet."""

    @property
    def eviction(self) -> Eviction:
        return self._progress.eviction

    @property
    def slots(self) -> int:
        """The number of cache and staging slots."""
        return len(self._weights)

    @property
    def is_all_here(self) -> bool:
        """Whether every expert is resident, so that nothing must be read. Always False if the settings use
        low-precision copies, because only a budget that is too small for all experts needs them."""
        return not self.table.has_low and len(self.table.ready) == self._experts

    @property
    def preloads(self) -> bool:
        """Whether experts are loaded into free slots before their first use."""
        return self._preloads

    @property
    def running(self) -> float:
        """The number of loads that are being transferred. Each of them counts as half a load, because on average half
        of it is done."""
        return sum(0.5 for ticket in (*self.tickets.values(), *self._flowing) if ticket.state is TicketState.RUNNING)

    def awaited(self, plan: LayerPlan) -> list[Ticket]:
        """Return the unfinished loads for which expert tasks of the plan must wait."""
        found = (self.tickets.get(serve.key) for serve in plan.serves if serve.waits)
        return [ticket for ticket in found if ticket is not None and not ticket.is_over]

    def reset(self, eviction: Eviction) -> None:
        """Empty all slots, and reset the statistics and counters of loads."""
        self.recover()
        self._progress.reset(eviction)
        self.counters = Counters()
        self.transfers.reset()

    def forget(self) -> None:
        """Drop all references to the slots' memory. No load may be in flight, and no load may start afterwards."""
        self._weights = [None] * len(self._weights)
        self._views.clear()

    def adopt(self, plan: LayerPlan) -> None:
        """Start the loads of a layer's plan in their order, each as soon as its slot is free."""
        self._progress.adopt(plan)

    def prefetch(self, loads: Sequence[Load]) -> None:
        """Queue prefetches for later layers, after all loads of the running layer."""
        self.counters.prefetches += len(loads)
        self._progress.prefetch(loads)

    def bring(self, loads: Sequence[Load]) -> None:
        """Queue the given loads into cache slots. They are executed after all loads of the running layer."""
        self._progress.prefetch(loads)

    def preload(self) -> None:
        """Queue loads of missing experts into all free cache slots, also after each prompt. With slots for all experts
        the order is that of the layers, in which a prompt uses them."""
        self._preloads = True
        keys, slots = self.stores[EXACT].keys(), sum(pool.cache_slots for pool in self.table.pools)
        self.fill(keys if slots >= len(keys) else across_layers(keys))

    def fill(self, experts: Sequence[tuple[int, int]]) -> None:
        """Queue loads of those of the experts (layer, expert) that are missing, in their order, into free cache slots.
        Demand loads are executed before these loads."""
        if not any(pool.free_cache for pool in self.table.pools):
            return
        here = self.table.ready.keys() | self.table.inflight.keys()
        missing = [key for key in ((*at, EXACT) for at in experts) if key not in here]
        free = {pool: iter(list(pool.free_cache)) for pool in self.table.pools}
        slots = ((key, next(free[self.table.pool_of(key)], None)) for key in missing)
        self._progress.prefetch(
            [Load(key, slot, None, True, LoadReason.PREFETCH, 0) for key, slot in slots if slot is not None]
        )

    def pause_fill(self) -> None:
        """Cancel queued loads that no step waits for. A prompt needs many experts at once; other loads would take disk
        time from them, and hide from the planning of reads that these experts can be read ahead."""
        for key, ticket in list(self.tickets.items()):
            if ticket.load.reason is LoadReason.PREFETCH and self.transfers.cancel(ticket):
                self._close(key, ticket)

    def resume_preload(self) -> None:
        """Queue the loads of `preload` again, if it was called and slots are free."""
        if self._preloads and not self.is_all_here:
            self.preload()

    def resize(self, pool: SlotPool, cache_slots: int) -> list[int]:
        """Set the number of cache slots of a pool, between passes. Return the slots that were withdrawn; their content
        is lost."""
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
        """Cancel or await all loads into a pool's cache slots, so that each slot is free or holds a complete expert."""
        for key, ticket in list(self.tickets.items()):
            if self.table.pool_of(key) is pool and key not in self.table.staged:
                if not self.transfers.cancel(ticket) and not ticket.is_over:
                    ticket.join()
                self._close(key, ticket)

    def _begin(self, load: Load) -> None:
        self._weights[load.slot] = self._bind(load)
        self.tickets[load.key] = self.transfers.submit(load)

    def _bind(self, load: Load) -> Weights:
        """Return the weights of a load's expert as views of its slot. The views of one slot and layout are made only
        once."""
        layer, expert, form = load.key
        placement = self.stores[form].placement(layer, expert)
        key = (load.slot, placement.layout)  # a slot's format never changes
        weights = self._views.get(key)
        if weights is None:
            weights = self._views[key] = self._math[layer, form].bind(self._arena, load.slot, placement.parts)
        return weights

    def slots_of(self, math: ExpertMath, layer: int, count: int) -> list[Weights]:
        """Return the weights in `count` slots, in the layout of the layer `layer`. The slots may contain any experts,
        because only times are measured. If there are fewer slots than `count`, slots are repeated."""
        pool, parts = self.table.pool(layer), self.stores[EXACT].placement(layer, 0).parts
        slots = range(pool.first, pool.end)
        return [math.bind(self._arena, slots[n % len(slots)], parts) for n in range(count)]

    def _arrive(self, key: ExpertKey) -> Weights:
        """Return the weights of an expert whose load is in flight, after waiting for the load. If the load is already
        in the device's copy queue, only the device waits and not the thread."""
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
        """Record in the slot table that a load has succeeded or failed. On a GPU, the copy of a succeeded load may
        still be in the device's queue; the device waits for it, and no thread does."""
        del self.tickets[key]
        if ticket.state in (TicketState.FAILED, TicketState.CANCELLED):
            self._progress.fail(key)
            return
        self._progress.arrive(key)
        if not ticket.is_over:
            self._flowing.append(ticket)

    def collect(self) -> None:
        """Record in the slot table the loads that have ended since the last layer. An expert whose load failed is
        loaded again on demand.

        The host does not wait for prefetches that are already in the device's copy queue. If a load that only the
        device waits for has failed, its error is raised, because results were computed from the slot's content.
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
        """Free the staging slots of prefetched experts that `routing` does not use (`Progress.look_through` finds
        them).

        In decode, an unused copy that is still being read stays until a later layer, because its slot is not needed
        yet. A prefill needs the slot, so it waits for the read.
        """
        wanted, stale = self._progress.look_through(routing)
        self.counters.prefetches_used += len(wanted)
        for key in stale:
            ticket = self.tickets.get(key)
            if ticket is not None:
                if not self.transfers.cancel(ticket) and not ticket.is_over:
                    if routing.phase is Phase.DECODE:
                        continue
                    ticket.join()  # the next load into the slot must begin after this one
                self._close(key, ticket)
            if key in self.table.ready:
                self.table.release(key)

    def recover(self) -> None:
        """Restore a consistent state after an error or an interrupt: wait until no load is in flight, and keep only
        completely loaded experts."""
        self.transfers.drain()
        for ticket in self._flowing:
            if ticket.error is not None:
                self.table.ready.pop(ticket.load.key, None)
        self._flowing.clear()
        self.tickets.clear()
        self._progress.recover()

    def weights_of(self, serve: Serve) -> Weights:
        """Return the weights of the expert of a task, after waiting for its load if necessary."""
        return self.ready(serve.key) if serve.key in self.table.ready else self._arrive(serve.key)

    def is_coming(self, key: ExpertKey) -> bool:
        """Return whether an expert is in a slot, or its load has been started."""
        return key in self.table.ready or key in self.tickets

    def needs_no_wait(self, key: ExpertKey) -> bool:
        """Return whether an expert is in a slot, or its load has ended: `weights_of` then does not wait."""
        ticket = self.tickets.get(key)
        return key in self.table.ready if ticket is None else ticket.is_over

    def ready(self, key: ExpertKey) -> Weights:
        """Return the weights of an expert that is in a slot."""
        weights = self._weights[self.table.ready[key]]
        assert weights is not None, key
        return weights

    def served(self, serve: Serve, computed: int) -> None:
        """Record that an expert task is done, as number `computed` (from 1) of its plan. If the expert's slot was a
        staging slot, the slot is freed or becomes a cache slot. Loads that waited for the slot start."""
        self._progress.served(serve, computed)


def across_layers(experts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return experts (layer, expert) in an order in which every part of the list has as many experts of each layer, as
    far as possible. The experts of one layer stay in their order."""
    of_layers: dict[int, list[tuple[int, int]]] = {}
    for each in experts:
        of_layers.setdefault(each[0], []).append(each)
    rows = zip_longest(*(of_layers[layer] for layer in sorted(of_layers)))
    return [each for row in rows for each in row if each is not None]
