"""Plans one layer of one step (`plan_layer`): which experts are computed in which order, and which are loaded.

Every route is computed by the expert that the routing names: substitution and dropping come before. There are two
cases.

Decode (`plan_decode.py`). Resident experts come first, then those in flight, then the missing ones in the order of
their loads, so that computing overlaps reading. A missing expert takes a free cache slot or the slot of a victim. Where
one layer needs more experts than there are slots, later loads reuse the slots of experts computed before them (waves).
With a device that has its own memory, the CPU may compute some of the missing experts (`policy/balance.py`).

Prefill (`plan_prefill.py`). Experts are in ascending order, each loaded once, through the staging slots. Experts that
fit the layer's fair share of free cache slots stay, so a long prompt changes which experts of a layer are resident, but
not how many. Alternatively, the eviction policy's order decides. With a device that has its own memory, the CPU may
compute experts that do not stay and have few tokens.

Where experts have low copies, an expert that needs no more than that (`Routing.low`) is computed with its full copy
where that is at hand, else with the low one. The two formats have separate slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.answering import Assigned
from smoe.policy.balance import Sharing
from smoe.policy.eviction.base import Eviction
from smoe.policy.plan import LayerPlan
from smoe.policy.plan_decode import plan_decode
from smoe.policy.plan_prefill import plan_prefill
from smoe.policy.residency import SlotTable
from smoe.routing import Phase, Routing

LOW_USE = ("asked", "meanwhile", "only")
"""Which experts low copies compute. asked: experts that need no more and are not at hand; meanwhile: in decode also
experts that need more, are not at hand, and have a resident low copy; only: all, for measurements."""

PREFILL_KEEP = ("last-uses", "eviction")
"""What decides which experts of a prompt stay in the cache. last-uses: how often its last tokens use them, within each
layer; eviction: the eviction policy's order, over all layers."""


def plan_layer(
    routing: Routing,
    residency: SlotTable,
    eviction: Eviction,
    layer_share: int,
    balance: Sharing | Assigned | None = None,
    prefill_keep: str = "last-uses",
    low_use: str = "asked",
) -> LayerPlan:
    """Plan one layer of one step.

    `layer_share`: the cache slots that a prefill may leave filled for this layer; `balance`: which of the step's
    missing experts other units compute (None: none); `prefill_keep` (`PREFILL_KEEP`): which of a prompt's experts stay;
    `low_use` (`LOW_USE`): which experts low copies compute. Raises `BudgetError` where not even one expert can be
    loaded.
    """
    routes = routes_by_key(routing, _served_low(routing, residency, low_use))
    if routing.phase is Phase.DECODE:
        return plan_decode(routing, routes, residency, eviction, balance)
    assert not isinstance(balance, Assigned), "only decode steps have resolutions by quality cost"
    return plan_prefill(routing, routes, residency, eviction, layer_share, balance, prefill_keep)


def layer_share(cache_slots: int, layers: int) -> int:
    """Return the number of cache slots that a prefill may leave filled for each of `layers` layers."""
    return max(1, cache_slots // layers)


def layer_shares(residency: SlotTable, layers: Sequence[int]) -> dict[int, int]:
    """Return `layer_share` of every layer, where layers may have slots of several sizes."""
    pools = {layer: residency.pool(layer) for layer in layers}
    sharing = Counter(pools.values())
    return {layer: layer_share(pool.cache_slots, sharing[pool]) for layer, pool in pools.items()}


def routes_by_key(routing: Routing, low: Container[int] = ()) -> dict[ExpertKey, tuple[int, ...]]:
    """Return the flat route positions of every used expert, ascending by expert, without padding routes. The experts in
    `low` use their low copies.

    Within an expert, positions are ordered by choice, then by token, as the library's eager experts stack their rows:
    the order decides the last bits of a matrix product.
    """
    layer, rows = routing.layer, routing.top_k_index
    if len(rows) == 1:
        row = rows[0]
        order = sorted(range(len(row)), key=row.__getitem__)
        alone: dict[ExpertKey, tuple[int, ...]] = {
            (layer, row[k], LOW if row[k] in low else EXACT): (k,) for k in order if row[k] != routing.experts
        }
        if len(alone) == len(row):  # otherwise one is padding, or is chosen twice
            return alone
    found: dict[int, list[int]] = {}
    width = len(rows[0])
    for choice in range(width):
        for token, row in enumerate(rows):
            found.setdefault(row[choice], []).append(token * width + choice)
    found.pop(routing.experts, None)
    return {(layer, expert, LOW if expert in low else EXACT): tuple(found[expert]) for expert in sorted(found)}


def _served_low(routing: Routing, residency: SlotTable, low_use: str) -> set[int]:
    """Return the chosen experts that low copies compute."""
    layer = routing.layer
    if not residency.has_low:
        return set()
    if low_use == "asked" and not routing.low:
        return set()
    chosen = {expert for row in routing.top_k_index for expert in row}
    if low_use == "only":
        return chosen
    asking: set[int] = set(routing.low)
    if low_use == "meanwhile" and routing.phase is Phase.DECODE:
        asking |= {expert for expert in chosen if (layer, expert, LOW) in residency.ready}
    return {expert for expert in asking if not residency.is_at_hand((layer, expert, EXACT))}
