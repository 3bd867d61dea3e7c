"""Decides one layer of one step: from the router's choice to the experts that are computed and loaded.

    routing -> importance -> substitutes -> dropped experts -> unused prefetches freed -> statistics -> plan

The engine executes a decision on hardware, the simulator without. Both call `decide`, so the replay of a recorded run
gives the same plans.

A plan computes every route with the expert that the routing names: routes were substituted or dropped before. There are
two cases.

Decode (`plan_decode.py`). Resident experts are computed first, then those in flight, then missing ones in the order of
their loads, so that computing overlaps reading. A missing expert is loaded into a free cache slot or the slot of a
victim. If one layer needs more experts than there are slots, later loads use the slots of experts that were computed
before (waves). On a device with its own memory, the CPU may compute some of the missing experts
(`policy/load_or_compute.py`).

Prefill (`plan_prefill.py`). Experts are computed in ascending order, each loaded at most once, through the staging
slots. As many become resident as the layer's share of free cache slots allows. A long prompt therefore changes which
experts of a layer are resident, but not how many. As an alternative, the eviction policy decides which become resident.
On a device with its own memory, the CPU may compute experts that do not become resident and have few tokens.

If experts have low-precision copies, an expert for which a low-precision copy suffices (`Routing.low`) is computed with
its full copy if that is resident or in flight, otherwise with its low-precision copy. The two formats have separate
slots.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.answering import Answered, Assigned
from smoe.policy.eviction.base import Eviction
from smoe.policy.importance import ALL_IMPORTANT, Thresholds, graded, without
from smoe.policy.load_or_compute import Sharing
from smoe.policy.plan import LayerPlan
from smoe.policy.plan_decode import plan_decode
from smoe.policy.plan_prefill import plan_prefill
from smoe.policy.residency import ExpertsAtHand, ExpertsUnderWay, SlotTable
from smoe.policy.substitution import Selection, applied, substitute
from smoe.routing import Phase, Routing, last_rows

LOW_USE = ("asked", "meanwhile", "only")
"""Which experts are computed with their low-precision copies. asked: experts that are not at hand and for which a
low-precision copy suffices. meanwhile: in decode, also other experts that are not at hand and have a resident
low-precision copy. only: all experts, for measurements."""

PREFILL_KEEP = ("last-uses", "eviction")
"""Which experts of a prompt become resident. last-uses: those that the prompt's last tokens use most, compared within
each layer. eviction: those that the eviction policy ranks highest, over all layers."""


class Switches(NamedTuple):
    """The settings of `EngineConfig` that affect a decision. The defaults mean exact serving."""

    alpha: float = 0.0
    """The substitution threshold of decode steps; 0: no substitution."""
    drop: bool = False
    """Whether missing low-score experts are dropped, not replaced."""
    share: bool = True
    """Whether, in a batch, substitutes that several sequences can use are preferred."""
    prefill_keep: str = "last-uses"
    """Which experts of a prompt become resident, one of `PREFILL_KEEP`."""
    thresholds: Thresholds = ALL_IMPORTANT
    """The importance thresholds of missing experts, if there are low-precision copies."""
    low_use: str = "asked"
    """Which experts are computed with their low-precision copies, one of `LOW_USE`."""

    @property
    def needs_weights(self) -> bool:
        """Whether `Routing.weights` is required."""
        return self.thresholds != ALL_IMPORTANT


EXACT_SWITCHES = Switches()


class Decision(NamedTuple):
    """The result of `decide`: how one layer of one step is computed."""

    routing: Routing
    """The routing that is computed, with substitutes and with the index E for dropped routes."""
    selection: Selection | None
    """The replaced and dropped routes. None for a prompt, and if substitution is off."""
    plan: LayerPlan
    skipped: int = 0
    """The number of experts that are dropped because of low importance, or of routes that a quality budget drops."""


def decide(
    routing: Routing,
    table: SlotTable,
    eviction: Eviction,
    layer_share: int,
    switches: Switches,
    balance: Callable[[], Sharing | None] | None = None,
    drop_stale: Callable[[Routing], None] | None = None,
    answer: Callable[[Routing, SlotTable], Answered] | None = None,
) -> Decision:
    """Return the decision for one layer of one step. `eviction` observes the step; `table` is only read. Raise
    `BudgetError` if not even one expert can be loaded.

    `routing.scores` is required if `alpha` is above 0; without scores nothing is replaced. `routing.weights` is
    required if thresholds are below 1. `layer_share`: as in `plan_layer`. `answer`: resolves the misses of decode steps
    by quality cost; `alpha` is ignored then. `drop_stale`: receives the final routing and frees the staging slots of
    unused prefetches. `balance`: called after that; returns the object that divides the misses between compute units.
    """
    selection, assigned, skip = None, None, frozenset[int]()
    if switches.needs_weights:
        routing, skip = graded(routing, switches.thresholds)
    here = ExpertsAtHand(routing.layer, table, routing.low)
    if answer is not None and routing.phase is Phase.DECODE:
        routing, selection, assigned = answer(routing, table)
    elif switches.alpha > 0 and routing.phase is Phase.DECODE and routing.scores is not None:
        under_way = ExpertsUnderWay(routing.layer, table)
        selection = substitute(
            routing, here, switches.alpha, share=switches.share, drop=switches.drop, under_way=under_way
        )
        routing = applied(selection, routing)
    gone = frozenset(expert for expert in skip if expert not in here)
    if gone:
        routing = without(routing, gone)
    if drop_stale is not None and table.staged:
        drop_stale(routing)
    eviction.observe(observation(routing))
    shared = assigned if assigned is not None or balance is None else balance()
    plan = plan_layer(routing, table, eviction, layer_share, shared, switches.prefill_keep, low_use=switches.low_use)
    skipped = len(gone)
    if assigned is not None and selection is not None:
        skipped = sum(replacement.substitute is None for replacement in selection.replacements)
    return Decision(routing, selection, plan, skipped)


def observation(routing: Routing) -> Routing:
    """Return the part of a step's routing that an eviction policy observes. Of a decode step it is the whole routing,
    and of a prefill only the last tokens."""
    if routing.phase is Phase.DECODE:
        return routing
    last = last_rows(routing)
    weights = None if routing.weights is None else [routing.weights[row] for row in last]
    return routing._replace(top_k_index=[routing.top_k_index[row] for row in last], weights=weights, sequences=1)


def plan_layer(
    routing: Routing,
    residency: SlotTable,
    eviction: Eviction,
    layer_share: int,
    balance: Sharing | Assigned | None = None,
    prefill_keep: str = "last-uses",
    low_use: str = "asked",
) -> LayerPlan:
    """Return the plan for one layer of one step. Raise `BudgetError` if not even one expert can be loaded.

    `layer_share`: the number of cache slots that a prefill may fill for this layer. `balance`: decides which missing
    experts other units compute; None: the device computes all. `prefill_keep`: one of `PREFILL_KEEP`. `low_use`: one of
    `LOW_USE`.
    """
    routes = routes_by_key(routing, _served_low(routing, residency, low_use))
    if routing.phase is Phase.DECODE:
        return plan_decode(routing, routes, residency, eviction, balance)
    assert not isinstance(balance, Assigned), "only decode steps have resolutions by quality cost"
    return plan_prefill(routing, routes, residency, eviction, layer_share, balance, prefill_keep)


def layer_share(cache_slots: int, layers: int) -> int:
    """Return the number of cache slots that a prefill may fill for each of `layers` layers."""
    return max(1, cache_slots // layers)


def layer_shares(residency: SlotTable, layers: Sequence[int]) -> dict[int, int]:
    """Return {layer: number of cache slots that a prefill may fill}, for layers whose slots may have several sizes."""
    pools = {layer: residency.pool(layer) for layer in layers}
    sharing = Counter(pools.values())
    return {layer: layer_share(pool.cache_slots, sharing[pool]) for layer, pool in pools.items()}


def routes_by_key(routing: Routing, low: Container[int] = ()) -> dict[ExpertKey, tuple[int, ...]]:
    """Return {expert: flat indices t * K + k of its routes}, ascending by expert, without padding. The experts in `low`
    are computed with their low-precision copies.

    The routes of one expert are ordered by choice k, then by token t, as the library's eager experts stack their rows:
    the order of rows affects the last bits of a matrix product.
    """
    layer, rows = routing.layer, routing.top_k_index
    if len(rows) == 1:
        row, padding = rows[0], routing.experts
        alone: dict[ExpertKey, tuple[int, ...]] = {
            (layer, expert, LOW if expert in low else EXACT): (k,)
            for expert, k in sorted(zip(row, range(len(row)), strict=True))
            if expert != padding
        }
        if len(alone) == len(row):  # otherwise an expert is padding, or is chosen twice
            return alone
    found: dict[int, list[int]] = defaultdict(list)
    width = len(rows[0])
    for choice, column in enumerate(zip(*rows, strict=True)):
        for route, expert in zip(range(choice, len(rows) * width, width), column, strict=True):
            found[expert].append(route)
    found.pop(routing.experts, None)
    return {(layer, expert, LOW if expert in low else EXACT): tuple(found[expert]) for expert in sorted(found)}


def _served_low(routing: Routing, residency: SlotTable, low_use: str) -> set[int]:
    """Return the chosen experts that are computed with their low-precision copies in this step."""
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
