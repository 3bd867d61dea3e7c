"""Plans loads of experts before they are needed. Experts of later layers are prefetched into staging slots; in idle
time, full copies are loaded into cache slots in place of low-precision copies (upgrades)."""

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
    """Return the prefetches for the nearest layer with missing predicted experts, best first. `predictions` are in the
    order of the layers. `current` is the plan that runs now; `Load.after` counts the serves of this plan.

    A later layer is considered only if all predicted experts of the earlier ones are resident or in flight (HOBBIT,
    arXiv 2411.01433, section 3.3: adaptive depth). A prefetch evicts nothing, because it uses a free staging slot. If
    the prediction was right, the copy is promoted to a cache slot when its layer runs.
    """
    for prediction in predictions:
        if prediction.is_next:
            break  # predictions for the next token: staged copies would be dropped before it
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
    """Return loads of full copies into cache slots, for experts that low-precision copies compute in this decode step.
    These loads come after all loads for which the layer waits.

    If the router's weights demand the full copy of an expert, it is loaded. Otherwise, if nothing else is read
    (`is_idle`), only the expert of highest worth is loaded, and only if its worth exceeds that of the evicted resident.
    At most as many upgrades are in flight as there are staging slots, because each has already evicted a resident. One
    cache slot is left for the following layers.
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
    """Return the predicted copies that are neither resident nor in flight."""
    layer, experts, low, _ = prediction
    missing = [key for key in ((layer, expert, EXACT) for expert in experts) if not residency.is_at_hand(key)]
    if not low:
        return missing
    asked = [(layer, expert, LOW if expert in low else EXACT) for _, expert, _ in missing]
    return [key for key in asked if not residency.is_at_hand(key)]


def prefetch_slots(residency: SlotTable, current: LayerPlan, pool: SlotPool) -> list[tuple[int, int]]:
    """Return the staging slots of `pool` that a prefetch may use while the plan `current` runs, as pairs (slot, the
    number of serves that must be complete before the slot is used).

    One staging slot more stays free, so that a layer whose prediction was wrong can always load its experts.
    """
    spare = current.spare.get(pool.first)
    if spare is None:
        spare = spare_slots(pool)
    held = sum(key[0] > current.layer and residency.pool_of(key) is pool for key in residency.staged)
    return spare[: max(0, pool.staging_slots - 1 - held)]


def has_prefetch_slots(residency: SlotTable, current: LayerPlan) -> bool:
    """Return whether a prefetch may use a staging slot of any pool while the plan `current` runs."""
    return any(prefetch_slots(residency, current, pool) for pool in residency.pools)


def spare_slots(pool: SlotPool) -> list[tuple[int, int]]:
    """Return the free staging slots of a pool as pairs (slot, 0). The 0 means that a prefetch may use the slot at
    once."""
    return [(slot, 0) for slot in pool.free_staging]
