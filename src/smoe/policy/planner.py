"""`plan_layer`: from one layer's routing and residency to what is computed, in which order, and what is loaded.

Exact selection only: every route is served by the expert the model chose. Two regimes.

Decode. Resident experts first, then those that are under way, then the missing ones in the order of their loads,
so that computing hides reading. A missing expert takes a free cache slot, else the slot of a victim; where one layer
wants more experts than there are slots, later loads reuse the slots of experts computed before them (waves). Beside a
device with a memory of its own, the CPU may compute some of the missing ones where they lie (`policy/balance.py`).

Prefill. Experts in ascending order, each brought in once, streaming through the staging slots. What fits the layer's
fair share of free cache slots stays, the experts that the prompts' last tokens use first; beyond it such an expert
takes, once it has served, the slot of a resident of its layer that they use less. So a long prompt changes who is
resident in a layer, never how many. Asked to, the eviction policy's order decides instead. Beside a device with a
memory of its own, the CPU may compute those that pass through and have few tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from smoe.errors import BudgetError
from smoe.expert import EXACT, ExpertKey
from smoe.policy.balance import Balance
from smoe.policy.eviction.base import Eviction
from smoe.policy.plan import DEVICE, HOST, LayerPlan, Load, Promotion, Reason, Serve
from smoe.policy.prediction import Prediction
from smoe.policy.residency import SlotPool, SlotTable
from smoe.routing import Phase, Routing

PREFILL_KEEP = ("last-uses", "eviction")
"""What decides which experts of a prompt stay in the cache: how often its last tokens use them, within each layer; or
the eviction policy's own order, over all layers."""

LAST_TOKENS = 32
"""How many last tokens of a prompt, or of the prompts of a batch together, decide which experts stay after prefill.

Shared out they hit a little more than as many of each prompt (docs/log.md), and cost as much for any batch."""


def plan_layer(
    routing: Routing,
    residency: SlotTable,
    eviction: Eviction,
    layer_share: int,
    balance: Balance | None = None,
    prefill_keep: str = "last-uses",
) -> LayerPlan:
    """Decide one layer of one step.

    `layer_share` is the number of cache slots that a prefill may leave filled for this layer; `balance` says which of
    the step's missing experts the CPU computes (None: none); `prefill_keep` (`PREFILL_KEEP`) what decides which of a
    prompt's experts stay. Raises `BudgetError` where not even one expert can be brought in.
    """
    routes = routes_by_key(routing)
    if routing.phase is Phase.DECODE:
        return _plan_decode(routing, routes, residency, eviction, balance)
    staying = _staying(routing, routes, residency, eviction, layer_share, prefill_keep)
    return _plan_prefill(routing.layer, routes, residency, staying, balance)


def layer_share(cache_slots: int, layers: int) -> int:
    """Cache slots that a prefill may leave filled for each of `layers` layers."""
    return max(1, cache_slots // layers)


def layer_shares(residency: SlotTable, layers: Sequence[int]) -> dict[int, int]:
    """`layer_share` of every layer, where they may have slots of several sizes."""
    pools = {layer: residency.pool(layer) for layer in layers}
    sharing = Counter(pools.values())
    return {layer: layer_share(pool.cache_slots, sharing[pool]) for layer, pool in pools.items()}


def plan_prefetch(predictions: Iterable[Prediction], residency: SlotTable, current: LayerPlan) -> list[Load]:
    """Bring in what is missing for the nearest layer that misses anything, best first, while `current` runs.

    `predictions` come nearest layer first; a layer is looked at only where all that is predicted for those before it
    is here or under way (HOBBIT, arXiv 2411.01433, section 3.3: adaptive depth). A wrong guess evicts nothing, as it
    goes to a spare staging slot; a right one is promoted when its layer comes. `Load.after` counts the serves of
    `current`.
    """
    for layer, experts in predictions:
        missing = [key for key in ((layer, expert, EXACT) for expert in experts) if not residency.is_at_hand(key)]
        if missing:
            return [
                Load(key, slot, None, False, Reason.PREFETCH, after)
                for key, (slot, after) in zip(
                    missing, prefetch_slots(residency, current, residency.pool(layer)), strict=False
                )
            ]
    return []


def prefetch_slots(residency: SlotTable, current: LayerPlan, pool: SlotPool) -> list[tuple[int, int]]:
    """The staging slots of a pool that a prefetch may take beside `current`: (slot, serves that must have been
    computed before).

    One is left alone beside these and those that hold copies for later layers, so that a layer whose prediction was
    wrong can always stream through it.
    """
    spare = current.spare if pool is residency.pool(current.layer) else _spare(pool)
    held = sum(key[0] > current.layer and residency.pool(key[0]) is pool for key in residency.staged)
    return spare[: max(0, pool.staging_slots - 1 - held)]


def has_prefetch_slots(residency: SlotTable, current: LayerPlan) -> bool:
    """Whether a prefetch for any layer has somewhere to go."""
    return any(prefetch_slots(residency, current, pool) for pool in residency.pools)


def observation(routing: Routing) -> Routing:
    """What an eviction policy learns from a step: all of a decode step, the last tokens of a prefill."""
    if routing.phase is Phase.DECODE:
        return routing
    return routing._replace(top_k_index=[routing.top_k_index[row] for row in last_rows(routing)], sequences=1)


def real_rows(routing: Routing) -> list[int] | None:
    """Rows that are no padding, nor of a sequence that has ended; None: all."""
    rows = [row for row, chosen in enumerate(routing.top_k_index) if min(chosen) != routing.experts]
    return None if len(rows) == len(routing.top_k_index) else rows


def last_rows(routing: Routing) -> list[int]:
    """Rows of the last tokens of every sequence, padding left out; together `LAST_TOKENS`, and one of each at least.

    Oldest first and the sequences in turn, as if they had been decoded together: a policy that weighs the newest rows
    most, or has room for a few, then treats all sequences alike.
    """
    rows, padding = routing.top_k_index, routing.experts
    length, share = len(rows) // routing.sequences, max(1, LAST_TOKENS // routing.sequences)
    ends = []
    for first in range(0, len(rows), length):
        backwards = (row for row in range(first + length - 1, first - 1, -1) if min(rows[row]) != padding)
        ends.append(list(islice(backwards, share)))
    return [end[back] for back in range(share - 1, -1, -1) for end in ends if back < len(end)]


def routes_by_key(routing: Routing) -> dict[ExpertKey, tuple[int, ...]]:
    """Flat route positions of every expert used, ascending by expert; padding routes are left out.

    Within an expert by choice, then by token: the order in which the library's eager experts stack their rows, which
    decides the last bits of a matrix product.
    """
    layer, rows = routing.layer, routing.top_k_index
    if len(rows) == 1:
        row = rows[0]
        order = sorted(range(len(row)), key=row.__getitem__)
        return {(layer, row[k], EXACT): (k,) for k in order if row[k] != routing.experts}
    found: dict[int, list[int]] = {}
    width = len(rows[0])
    for choice in range(width):
        for token, row in enumerate(rows):
            found.setdefault(row[choice], []).append(token * width + choice)
    found.pop(routing.experts, None)
    return {(layer, expert, EXACT): tuple(found[expert]) for expert in sorted(found)}


def _plan_decode(
    routing: Routing,
    routes: dict[ExpertKey, tuple[int, ...]],
    residency: SlotTable,
    eviction: Eviction,
    balance: Balance | None,
) -> LayerPlan:
    layer, pool = routing.layer, residency.pool(routing.layer)
    ready_slots, inflight, staged = residency.ready, residency.inflight, residency.staged
    ready: list[Serve] = []
    waiting: list[Serve] = []
    missing: list[Serve] = []
    wanted_staged: list[ExpertKey] = []
    for key, positions in routes.items():
        if key in ready_slots:
            ready.append(Serve(key, positions, False))
        elif key in inflight:
            waiting.append(Serve(key, positions, True))
        else:
            missing.append(Serve(key, positions, True))
            continue
        if key in staged:
            wanted_staged.append(key)
    hits = len(ready) + len(waiting)
    if not missing and not wanted_staged:
        return LayerPlan(layer, ready + waiting, [], [], hits, _spare(pool))

    missing, on_host = (missing, []) if balance is None else balance.split(missing, routing)
    free = deque(pool.free_cache)
    victims = deque(eviction.victims(max(0, len(missing) + len(wanted_staged) - len(free)), routes))
    promotions = _promote(wanted_staged, free, victims)
    serves = ready + waiting + missing
    loads = _loads(missing, serves, free, victims, residency, {p.key for p in promotions})
    return LayerPlan(layer, serves + on_host, loads, promotions, hits, _spare(pool))


def _promote(wanted: Sequence[ExpertKey], free: deque[int], victims: deque[ExpertKey]) -> list[Promotion]:
    """Keep what a prefetch brought in and the layer wants, as far as cache slots allow; uses up free and victims."""
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
    """Slots for the missing experts: free ones, victims, then those of experts computed earlier in this plan."""
    loads: list[Load] = []
    slot_of: dict[ExpertKey, int] = {}
    reusable = ((n, serve.key) for n, serve in enumerate(serves) if _in_cache(serve.key, residency, promoted))
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
                    f"layer {serve.key[0]} needs one more expert slot and none of "
                    f"{residency.pool(serve.key[0]).cache_slots} can be freed"
                )
            slot = slot_of[victim] if victim in slot_of else _slot(victim, residency)
            after = position + 1
        slot_of[serve.key] = slot
        loads.append(Load(serve.key, slot, victim, True, Reason.DEMAND, after))
    return loads


def _slot(key: ExpertKey, residency: SlotTable) -> int:
    return residency.ready[key] if key in residency.ready else residency.inflight[key]


def _in_cache(key: ExpertKey, residency: SlotTable, promoted: set[ExpertKey]) -> bool:
    return key not in residency.staged or key in promoted


def _spare(pool: SlotPool) -> list[tuple[int, int]]:
    """What nobody uses: the staging slots of a layer that is decoded, or of another size than the running layer's."""
    return [(slot, 0) for slot in pool.free_staging]


def _plan_prefill(
    layer: int,
    routes: dict[ExpertKey, tuple[int, ...]],
    residency: SlotTable,
    staying: _Staying,
    balance: Balance | None,
) -> LayerPlan:
    ready, inflight, pool = residency.ready, residency.inflight, residency.pool(layer)
    missing = [key for key in routes if key not in ready and key not in inflight]
    serves = [Serve(key, positions, key not in ready) for key, positions in routes.items()]
    if balance is not None:
        serves = _share_with_host(serves, {key for key in missing if not staying.has(key)}, len(missing), balance)
    on_host = {serve.key for serve in serves if serve.unit != DEVICE}
    loaded = [key for key in missing if key not in on_host]
    free = deque(pool.free_cache)
    promotions = _promotions(serves, residency, staying, free)
    passing = [key for key in routes if key not in staying.free and (key in residency.staged or key in loaded)]
    slots = _staging_order(serves, passing, residency, pool.free_staging, staying.instead)
    loads: list[Load] = []
    for key in loaded:
        if key in staying.free:
            loads.append(Load(key, free.popleft(), None, True, Reason.DEMAND, 0))
            continue
        place = next(slots, None)
        if place is None:
            raise BudgetError(f"layer {layer} of a prefill needs a staging slot; there are {pool.staging_slots}")
        loads.append(Load(key, place[0], None, False, Reason.DEMAND, place[1]))
    return LayerPlan(layer, serves, loads, promotions, len(serves) - len(missing), list(slots))


def _promotions(serves: Sequence[Serve], residency: SlotTable, staying: _Staying, free: deque[int]) -> list[Promotion]:
    """What is prefetched stays at once where a slot is free (uses up `free`); what takes a resident's, once it has
    served."""
    promotions: list[Promotion] = []
    for computed, serve in enumerate(serves, start=1):
        if serve.key in staying.instead:
            promotions.append(Promotion(serve.key, staying.instead[serve.key], computed))
        elif serve.key in staying.free and serve.key in residency.staged:
            free.popleft()
            promotions.append(Promotion(serve.key, None))
    return promotions


class _Staying(NamedTuple):
    """The experts of a prefill that are resident afterwards and were not before."""

    free: set[ExpertKey]
    """Those that go to free cache slots."""
    instead: dict[ExpertKey, ExpertKey]
    """Those that take the slot of a resident."""

    def has(self, key: ExpertKey) -> bool:
        return key in self.free or key in self.instead


def _staying(
    routing: Routing,
    routes: Mapping[ExpertKey, object],
    residency: SlotTable,
    eviction: Eviction,
    layer_share: int,
    keep: str,
) -> _Staying:
    """Within the layer's share free slots are filled, first by what the last tokens use most. Then residents of less
    value give way, if their layer does not want them any more when the newcomer has served: by last uses those of this
    layer, by the eviction policy any."""
    ready, inflight, staged = residency.ready, residency.inflight, residency.staged
    last_uses = Counter(
        (routing.layer, expert, EXACT) for row in last_rows(routing) for expert in routing.top_k_index[row]
    )
    newcomers = [key for key in routes if key in staged or (key not in ready and key not in inflight)]
    residents = [key for key in ready if key[0] == routing.layer and key not in staged]
    room = max(0, min(len(residency.pool(routing.layer).free_cache), layer_share - len(residents)))
    value: Callable[[ExpertKey], float] = last_uses.__getitem__
    newcomers.sort(key=lambda key: (-value(key), key))
    if keep == "eviction":
        value = eviction.worth
        newcomers.sort(key=lambda key: -value(key))
    free, others = set(newcomers[:room]), newcomers[room:]
    if keep == "eviction":
        residents = eviction.victims(len(others), ())
    else:
        residents.sort(key=lambda key: (value(key), key))
    return _Staying(free, _pairs(others, residents, routes, value))


def _pairs(
    newcomers: Sequence[ExpertKey],
    residents: list[ExpertKey],
    routes: Container[ExpertKey],
    value: Callable[[ExpertKey], float],
) -> dict[ExpertKey, ExpertKey]:
    """Each newcomer, best first, with the least valuable resident that has served before it, or is not used."""
    instead: dict[ExpertKey, ExpertKey] = {}
    for key in newcomers:
        for resident in residents:
            if value(resident) >= value(key):
                break
            if resident not in routes or resident < key:
                instead[key] = resident
                residents.remove(resident)
                break
    return instead


def _share_with_host(serves: list[Serve], passing: Container[ExpertKey], missing: int, balance: Balance) -> list[Serve]:
    """The CPU computes some of the experts that would only pass through; what stays has to be loaded anyway."""
    candidates = [serve for serve in serves if serve.key in passing]
    on_host = balance.split_prompt(candidates, missing - len(candidates))
    return [serve._replace(unit=HOST) if serve.key in on_host else serve for serve in serves]


def _staging_order(
    serves: Sequence[Serve],
    passing: Sequence[ExpertKey],
    residency: SlotTable,
    free_staging: Iterable[int],
    instead: Mapping[ExpertKey, ExpertKey],
) -> Iterator[tuple[int, int]]:
    """Staging slots in the order in which they come free while `serves` are computed: (slot, serves computed before).

    First the free ones, then, serve by serve, the slot of each expert that only passes through, or that of the resident
    `instead` of which it stays. Slots handed out here
    are given to the passing experts that still miss one, in serve order, so the slots that come free later are known
    too.
    """
    handed_out: deque[int] = deque()
    for slot in free_staging:
        handed_out.append(slot)
        yield slot, 0
    passes = set(passing)
    for computed, serve in enumerate(serves, start=1):
        if serve.key not in passes:
            continue
        is_staged = serve.key in residency.staged
        if not is_staged and not handed_out:
            return  # no slot will ever come free: the caller refuses
        slot = _slot(serve.key, residency) if is_staged else handed_out.popleft()
        if serve.key in instead:
            slot = residency.ready[instead[serve.key]]
        handed_out.append(slot)
        yield slot, computed
