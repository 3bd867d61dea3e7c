"""What is brought in before it is asked for, while a layer runs: experts of later layers, into staging slots."""

from __future__ import annotations

from collections.abc import Iterable

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.plan import LayerPlan, Load, Reason
from smoe.policy.prediction import Prediction
from smoe.policy.residency import SlotPool, SlotTable


def plan_prefetch(predictions: Iterable[Prediction], residency: SlotTable, current: LayerPlan) -> list[Load]:
    """Bring in what is missing for the nearest layer that misses anything, best first, while `current` runs.

    `predictions` come nearest layer first; a layer is looked at only where all that is predicted for those before it
    is here or under way (HOBBIT, arXiv 2411.01433, section 3.3: adaptive depth). A wrong guess evicts nothing, as it
    goes to a spare staging slot; a right one is promoted when its layer comes. `Load.after` counts the serves of
    `current`.
    """
    for prediction in predictions:
        missing = _missing(prediction, residency)
        if missing:
            slots = {
                form: iter(prefetch_slots(residency, current, residency.pool(prediction.layer, form)))
                for form in {key[2] for key in missing}
            }
            placed = ((key, next(slots[key[2]], None)) for key in missing)
            return [Load(key, at[0], None, False, Reason.PREFETCH, at[1]) for key, at in placed if at is not None]
    return []


def _missing(prediction: Prediction, residency: SlotTable) -> list[ExpertKey]:
    """The copies that are predicted to be wanted and are neither here nor under way."""
    layer, experts, low = prediction
    missing = [key for key in ((layer, expert, EXACT) for expert in experts) if not residency.is_at_hand(key)]
    if not low:
        return missing
    asked = [(layer, expert, LOW if expert in low else EXACT) for _, expert, _ in missing]
    return [key for key in asked if not residency.is_at_hand(key)]


def prefetch_slots(residency: SlotTable, current: LayerPlan, pool: SlotPool) -> list[tuple[int, int]]:
    """The staging slots of a pool that a prefetch may take beside `current`: (slot, serves that must have been
    computed before).

    One is left alone beside these and those that hold copies for later layers, so that a layer whose prediction was
    wrong can always stream through it.
    """
    spare = current.spare.get(pool.first)
    if spare is None:
        spare = spare_slots(pool)
    held = sum(key[0] > current.layer and residency.pool_of(key) is pool for key in residency.staged)
    return spare[: max(0, pool.staging_slots - 1 - held)]


def has_prefetch_slots(residency: SlotTable, current: LayerPlan) -> bool:
    """Whether a prefetch for any layer has somewhere to go."""
    return any(prefetch_slots(residency, current, pool) for pool in residency.pools)


def spare_slots(pool: SlotPool) -> list[tuple[int, int]]:
    """What nobody uses: the staging slots of a layer that is decoded, or of another size than the running layer's."""
    return [(slot, 0) for slot in pool.free_staging]
