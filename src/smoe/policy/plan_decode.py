"""Plans one layer of a decode step: the order in which experts are computed, and the loads with their slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from smoe.errors import BudgetError
from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.answering import Assigned
from smoe.policy.eviction.base import Eviction
from smoe.policy.load_or_compute import Sharing
from smoe.policy.plan import LayerPlan, Load, LoadReason, Promotion, Serve
from smoe.policy.residency import SlotTable
from smoe.routing import Routing


def plan_decode(
    routing: Routing,
    routes: dict[ExpertKey, tuple[int, ...]],
    residency: SlotTable,
    eviction: Eviction,
    balance: Sharing | Assigned | None,
) -> LayerPlan:
    """Return the plan for one layer of a decode step. Resident experts are computed first, then experts in flight, then
    missing experts in the order of their loads. `routes`: the routes of every expert that is used."""
    ready_slots, inflight, staged = residency.ready, residency.inflight, residency.staged
    ready: list[Serve] = []
    waiting: list[Serve] = []
    missing: list[Serve] = []
    lower: list[Serve] = []
    """The missing experts that are loaded as low-precision copies."""
    wanted_staged: list[ExpertKey] = []
    for key, positions in routes.items():
        if key in ready_slots:
            ready.append(Serve(key, positions, False))
        elif key in inflight:
            waiting.append(Serve(key, positions, True))
        else:
            (missing if key[2] == EXACT else lower).append(Serve(key, positions, True))
            continue
        if key in staged:
            wanted_staged.append(key)
    hits = len(ready) + len(waiting)
    if not missing and not wanted_staged and not lower:
        return LayerPlan(routing.layer, ready + waiting, [], [], hits, {})

    missing, on_host = (missing, []) if balance is None else balance.split(missing, routing)
    serves = ready + waiting + missing + lower
    promotions: list[Promotion] = []
    loads: list[Load] = []
    for form, wanted in ((EXACT, missing), (LOW, lower)):
        staged_keys = [key for key in wanted_staged if key[2] == form]
        if not wanted and not staged_keys:
            continue
        free = deque(residency.pool(routing.layer, form).free_cache)
        ranking = eviction.of(form) if residency.has_low else eviction  # formats have slots, and policies, of their own
        victims = deque(ranking.victims(max(0, len(wanted) + len(staged_keys) - len(free)), routes))
        promoted = _promote(staged_keys, free, victims)
        promotions += promoted
        loads += _loads(wanted, serves, free, victims, residency, {p.key for p in promoted})
    return LayerPlan(routing.layer, serves + on_host, loads, promotions, hits, {})


def _promote(wanted: Sequence[ExpertKey], free: deque[int], victims: deque[ExpertKey]) -> list[Promotion]:
    """Return promotions of the prefetched copies that this layer uses, as long as there are free cache slots or
    victims. Elements of `free` and `victims` that are used are removed."""
    promotions: list[Promotion] = []
    for key in wanted:
        if free:
            free.popleft()
            promotions.append(Promotion(key, None))
        elif victims:
            promotions.append(Promotion(key, victims.popleft()))
    return promotions


def _loads(
    missing: Sequence[Serve],
    serves: Sequence[Serve],
    free: deque[int],
    victims: deque[ExpertKey],
    residency: SlotTable,
    promoted: set[ExpertKey],
) -> list[Load]:
    """Return the loads of the missing experts. Free slots are used first, then the slots of victims, then the slots of
    experts that this plan computes before the load."""
    loads: list[Load] = []
    slot_of: dict[ExpertKey, int] = {}
    form = missing[0].key[2] if missing else EXACT
    here = ((n, serve.key) for n, serve in enumerate(serves) if serve.key[2] == form)
    reusable = ((n, key) for n, key in here if _in_cache(key, residency, promoted))
    for serve in missing:
        if free:
            slot, victim, after = free.popleft(), None, 0
        elif victims:
            victim = victims.popleft()
            slot, after = residency.ready[victim], 0
        else:
            position, victim = next(reusable, (0, None))
            if victim is None or victim == serve.key:
                raise BudgetError(
                    f"a decode step needs one more slot for an expert of layer {serve.key[0]}, and none of the "
                    f"{residency.pool_of(serve.key).cache_slots} slots can be freed; give more `memory`"
                )
            slot = slot_of[victim] if victim in slot_of else _slot(victim, residency)
            after = position + 1
        slot_of[serve.key] = slot
        loads.append(Load(serve.key, slot, victim, True, LoadReason.DEMAND, after))
    return loads


def _slot(key: ExpertKey, residency: SlotTable) -> int:
    return residency.ready[key] if key in residency.ready else residency.inflight[key]


def _in_cache(key: ExpertKey, residency: SlotTable, promoted: set[ExpertKey]) -> bool:
    return key not in residency.staged or key in promoted
