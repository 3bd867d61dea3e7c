"""Plans one layer of a prompt: every expert is loaded at most once, in ascending order, through the staging slots. The
plan also decides which of the experts become resident.

Experts become resident as long as cache slots are free, up to the number that this layer may fill. The experts that the
prompt's last tokens use most come first. When no more slots may be filled, an expert that these tokens use more than a
resident of the layer replaces this resident, after the expert has been computed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from smoe.errors import BudgetError
from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.base import Eviction
from smoe.policy.load_or_compute import Sharing
from smoe.policy.plan import DEVICE, LayerPlan, Load, LoadReason, Promotion, Serve
from smoe.policy.residency import SlotTable
from smoe.routing import Routing, last_rows


def plan_prefill(
    routing: Routing,
    routes: dict[ExpertKey, tuple[int, ...]],
    residency: SlotTable,
    eviction: Eviction,
    layer_share: int,
    balance: Sharing | None,
    keep: str,
) -> LayerPlan:
    """Return the plan for one layer of a prompt. `routes`: the routes of every expert that is used. `layer_share`: the
    number of cache slots that the layer's full copies may fill; low-precision copies may fill the same fraction of
    their slots. `keep`: one of `PREFILL_KEEP`, the rule by which experts stay resident."""
    layer, ready, inflight = routing.layer, residency.ready, residency.inflight
    forms = sorted({key[2] for key in routes})
    staying = _Staying(set(), {})
    takes_all = balance is not None and balance.takes_all
    for form in forms if not takes_all else ():
        staying.add(_staying(routing, routes, form, residency, eviction.of(form), layer_share, keep))
    missing = [key for key in routes if key not in ready and key not in inflight]
    serves = [Serve(key, positions, key not in ready) for key, positions in routes.items()]
    if balance is not None:
        own = {key for key in missing if key[2] == EXACT}
        serves = _share_out(serves, {key for key in own if not staying.has(key)}, len(own), balance)
    elsewhere = {serve.key for serve in serves if serve.unit != DEVICE}
    loaded = [key for key in missing if key not in elsewhere]
    promotions = _promotions(serves, residency, staying)
    passing = [key for key in routes if key not in staying.free and (key in residency.staged or key in loaded)]
    loads: dict[ExpertKey, Load] = {}
    spare: dict[int, list[tuple[int, int]]] = {}
    for form in forms:
        pool = residency.pool(layer, form)
        free = deque(pool.free_cache)
        exchanged = [free.popleft() for each in promotions if each.victim is None and each.key[2] == form]
        free_staging = (*pool.free_staging, *exchanged)  # promotions come before loads
        slots = _staging_order(
            serves, [key for key in passing if key[2] == form], residency, free_staging, staying.instead
        )
        for key in (key for key in loaded if key[2] == form):
            if key in staying.free:
                loads[key] = Load(key, free.popleft(), None, True, LoadReason.DEMAND, 0)
                continue
            place = next(slots, None)
            if place is None:
                raise BudgetError(
                    f"the prompt needs a staging slot for an expert of layer {layer}, and the layer's "
                    f"{pool.staging_slots} staging slots are in use"
                )
            loads[key] = Load(key, place[0], None, False, LoadReason.DEMAND, place[1])
        spare[pool.first] = list(slots)
    hits = len(serves) - len(missing)
    return LayerPlan(layer, serves, [loads[key] for key in loaded], promotions, hits, spare)


def _promotions(serves: Sequence[Serve], residency: SlotTable, staying: _Staying) -> list[Promotion]:
    """Return the promotions of copies that become resident. A prefetched copy for which a cache slot is free becomes
    resident at once. A copy that replaces a resident becomes resident after its serve."""
    promotions: list[Promotion] = []
    for computed, serve in enumerate(serves, start=1):
        if serve.key in staying.instead:
            promotions.append(Promotion(serve.key, staying.instead[serve.key], computed))
        elif serve.key in staying.free and serve.key in residency.staged:
            promotions.append(Promotion(serve.key, None))
    return promotions


class _Staying(NamedTuple):
    """The experts of one layer that stay in memory after a prefill."""

    free: set[ExpertKey]
    """The experts that get free cache slots."""
    instead: dict[ExpertKey, ExpertKey]
    """{expert: the resident that it replaces}."""

    def has(self, key: ExpertKey) -> bool:
        return key in self.free or key in self.instead

    def add(self, others: _Staying) -> None:
        self.free.update(others.free)
        self.instead.update(others.instead)


def _staying(
    routing: Routing,
    routes: Mapping[ExpertKey, object],
    form: int,
    residency: SlotTable,
    eviction: Eviction,
    layer_share: int,
    keep: str,
) -> _Staying:
    """Return the copies of one format that become resident. Free cache slots are filled first, up to the number that
    the layer may fill.

    After that, residents of less value are replaced, if the layer no longer needs them. With `keep` "last-uses" these
    are residents of this layer; with "eviction" they are residents of any layer, in the order of the eviction policy.
    """
    layer, ready, staged = routing.layer, residency.ready, residency.staged
    newcomers = [key for key in routes if key[2] == form and (key in staged or not residency.is_at_hand(key))]
    if not newcomers:
        return _Staying(set(), {})
    pool, own = residency.pool(layer, form), residency.pool(layer)
    share = layer_share
    if share and pool is not own:
        share = max(1, layer_share * pool.cache_slots // own.cache_slots)
    last_uses = Counter((layer, expert, form) for row in last_rows(routing) for expert in routing.top_k_index[row])
    residents = [key for key in ready if key[0] == layer and key[2] == form and key not in staged]
    room = max(0, min(len(pool.free_cache), share - len(residents)))
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
    """Return {new expert: the resident that it replaces}. The most valuable new experts come first. Each replaces the
    least valuable resident that has a lower value and that the layer either does not use or has already computed."""
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


def _share_out(serves: list[Serve], passing: Container[ExpertKey], missing: int, balance: Sharing) -> list[Serve]:
    """Return the serves. Some experts that do not become resident are assigned to other compute units. Experts that
    become resident must be loaded anyway, so the device computes them."""
    candidates = [serve for serve in serves if serve.key in passing]
    units = balance.split_prompt(candidates, missing - len(candidates))
    return [serve._replace(unit=units.get(serve.key, serve.unit)) for serve in serves]


def _staging_order(
    serves: Sequence[Serve],
    passing: Sequence[ExpertKey],
    residency: SlotTable,
    free_staging: Iterable[int],
    instead: Mapping[ExpertKey, ExpertKey],
) -> Iterator[tuple[int, int]]:
    """Yield staging slots in the order in which they become free while `serves` are computed, as pairs (slot, number of
    serves that must be complete before).

    First come the free staging slots. Then comes, serve by serve, the slot of each expert that does not become
    resident, or the slot of the resident that it replaces (`instead`). The caller gives the slots, in this order, to
    the `passing` experts that are not staged yet, which determines the later slots.
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
            return  # no slot will ever become free: the caller raises
        slot = _slot(serve.key, residency) if is_staged else handed_out.popleft()
        if serve.key in instead:
            slot = residency.ready[instead[serve.key]]
        handed_out.append(slot)
        yield slot, computed


def _slot(key: ExpertKey, residency: SlotTable) -> int:
    return residency.ready[key] if key in residency.ready else residency.inflight[key]
