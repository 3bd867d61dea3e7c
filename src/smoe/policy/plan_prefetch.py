"""Plans loads before they are needed: prefetches of later layers' experts into staging slots, and, in idle time,
upgrades of low copies into cache slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.eviction.base import Eviction
from smoe.policy.plan import LayerPlan, Load, LoadReason
from smoe.policy.prediction import Prediction
from smoe.policy.residency import SlotPool, SlotTable
from smoe.routing import Routing


def plan_prefetch(predictions: Iterable[Prediction], residency: SlotTable, current: LayerPlan) -> list[Load]:
    """Return loads for the nearest layer with missing predicted experts, best first, while `current` runs.

    `predictions` are in the order of layers. A layer is considered only where all that is predicted for the earlier
    ones is resident or in flight (HOBBIT, arXiv 2411.01433, section 3.3: adaptive depth). A wrong prediction evicts
    nothing, because it uses a spare staging slot; a right one is promoted when its layer runs. `Load.after` counts the
    serves of `current`.
    """
    for prediction in predictions:
        if prediction.is_next:
            break  # staged copies are dropped after their layer has passed
        missing = _missing(prediction, residency)
        if missing:
            slots = {
                form: iter(prefetch_slots(residency, current, residency.pool(prediction.layer, form)))
                for form in {key[2] for key in missing}
            }
            placed = ((key, next(slots[key[2]], None)) for key in missing)
            return [Load(key, at[0], None, False, LoadReason.PREFETCH, at[1]) for key, at in placed if at is not None]
    return []


def plan_upgrades(
    routing: Routing, current: LayerPlan, residency: SlotTable, eviction: Eviction, is_idle: bool
) -> list[Load]:
    """Return loads of full copies into cache slots, for experts that low copies compute in a decode step. They follow
    all loads that are waited for.

    Loaded are experts whose routes need the full copy. Otherwise, while nothing else is read (`is_idle`), it is the
    expert of highest worth, if that exceeds the evicted resident's. No more are in flight than there are staging slots,
    because each has already cost a resident. One cache slot is left for the following layers.
    """
    layer = routing.layer
    served = [(layer, serve.key[1], EXACT) for serve in current.serves if serve.key[2] == LOW]
    served = [key for key in served if not residency.is_at_hand(key)]
    if not served:
        return []
    own, pool = eviction.of(EXACT), residency.pool(layer)
    wanted = [key for key in served if key[1] not in routing.low]
    if not wanted and is_idle and not current.loads:
        wanted = [max(served, key=lambda key: (own.worth(key), key))]
    taken = {load.slot for load in current.loads}
    free = deque(slot for slot in pool.free_cache if slot not in taken)
    awaited = {serve.key for serve in current.serves}
    shield = awaited | {load.victim for load in current.loads if load.victim}
    others = residency.inflight.keys() - residency.staged - awaited
    under_way = sum(residency.pool_of(key) is pool for key in others)
    wanted = wanted[: max(0, min(pool.staging_slots, pool.cache_slots - 1) - under_way)]
    victims = deque(own.victims(len(wanted) - len(free), shield))
    loads: list[Load] = []
    for key in wanted:
        victim = None if free or not victims else victims.popleft()
        if victim is None and not free:
            break
        if victim is not None and key[1] in routing.low and own.worth(victim) >= own.worth(key):
            break
        slot = free.popleft() if victim is None else residency.ready[victim]
        loads.append(Load(key, slot, victim, True, LoadReason.UPGRADE, 0))
    return loads


def _missing(prediction: Prediction, residency: SlotTable) -> list[ExpertKey]:
    """Return the copies that are predicted and neither resident nor in flight."""
    layer, experts, low, _ = prediction
    missing = [key for key in ((layer, expert, EXACT) for expert in experts) if not residency.is_at_hand(key)]
    if not low:
        return missing
    asked = [(layer, expert, LOW if expert in low else EXACT) for _, expert, _ in missing]
    return [key for key in asked if not residency.is_at_hand(key)]


def prefetch_slots(residency: SlotTable, current: LayerPlan, pool: SlotPool) -> list[tuple[int, int]]:
    """Return the staging slots of a pool that a prefetch may use in addition to `current`: (slot, serves that must have
    been computed before).

    One more slot stays free, so that a layer whose prediction was wrong can always load through it.
    """
    spare = current.spare.get(pool.first)
    if spare is None:
        spare = spare_slots(pool)
    held = sum(key[0] > current.layer and residency.pool_of(key) is pool for key in residency.staged)
    return spare[: max(0, pool.staging_slots - 1 - held)]


def has_prefetch_slots(residency: SlotTable, current: LayerPlan) -> bool:
    """Return whether a prefetch for any layer has a slot."""
    return any(prefetch_slots(residency, current, pool) for pool in residency.pools)


def spare_slots(pool: SlotPool) -> list[tuple[int, int]]:
    """Return the free staging slots: those of a decoded layer, or of another size than the running layer's."""
    return [(slot, 0) for slot in pool.free_staging]
