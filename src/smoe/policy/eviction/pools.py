"""Eviction policies for slots in several pools: by layer, by slot size, or by the format of the copies.

Pools by size or format are necessary, because a copy fits only in slots of its size. Pools by layer are an option
(`--pools layer`) that keeps a single layer from taking all slots. In one global pool, a layer loses its slots to others
if its experts have similar scores or are used in turn. With pools by layer, every layer has an equal share of the
slots. A layer that has its full share evicts its own experts. A layer with less takes slots from the layers with the
most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.base import Eviction
from smoe.routing import Routing


class LayerPools(Eviction):
    """One eviction policy for each layer, and `share` slots for each layer."""

    name = "layer pools"

    def __init__(self, make: Callable[[], Eviction], share: int) -> None:
        assert share > 0, share
        self._make = make
        self._share = share
        self._pools: dict[int, Eviction] = {}
        self._sizes: Counter[int] = Counter()
        self._running = 0
        """The layer whose router was observed last; victims are chosen for it."""

    @property
    def rule(self) -> str:
        """The names of the rules that the layers' policies follow now, without repetitions."""
        return ", ".join(sorted({pool.rule for pool in self._pools.values()}))

    def insert(self, key: ExpertKey) -> None:
        self._pool(key[0]).insert(key)
        self._sizes[key[0]] += 1

    def remove(self, key: ExpertKey) -> None:
        self._pool(key[0]).remove(key)
        self._sizes[key[0]] -= 1

    def residents(self) -> set[ExpertKey]:
        return set().union(*(pool.residents() for pool in self._pools.values()))

    def observe(self, routing: Routing) -> None:
        self._running = routing.layer
        self._pool(routing.layer).observe(routing)

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        """Return victims for the layer whose router was observed last. If this layer has fewer slots than its equal
        share, residents of layers with more slots than theirs come first. Residents of this layer follow, and then
        residents of any layer."""
        found = [key for key in self._surplus() if key not in shield][: max(0, count)]
        for layer in (self._running, *self._others()):
            if len(found) < count:
                wanted = self._pool(layer).victims(count, shield)
                found += [key for key in wanted if key not in found][: count - len(found)]
        return found

    def worth(self, key: ExpertKey) -> float:
        return self._pool(key[0]).worth(key)

    def _surplus(self) -> list[ExpertKey]:
        lacking = self._share - self._sizes[self._running]
        taken: list[ExpertKey] = []
        for layer in self._others():
            beyond = min(lacking - len(taken), self._sizes[layer] - self._share)
            if beyond <= 0:
                break
            taken += self._pools[layer].victims(beyond, ())
        return taken

    def _others(self) -> list[int]:
        """Return the layers other than the one observed last, those with most residents first."""
        sizes = self._sizes
        return sorted((layer for layer in self._pools if layer != self._running), key=lambda n: (-sizes[n], n))

    def _pool(self, layer: int) -> Eviction:
        if layer not in self._pools:
            self._pools[layer] = self._make()
        return self._pools[layer]


class SizePools(Eviction):
    """One eviction policy for all layers whose experts have the same slot size, so that the victims of a layer have
    slots in which its experts fit."""

    name = "size pools"

    def __init__(self, pools: Mapping[int, Eviction]) -> None:
        """`pools`: {layer: policy}. Layers whose experts use the same slots have the same policy object."""
        self._pools = pools
        self._all = list({id(pool): pool for pool in pools.values()}.values())
        self._running = self._all[0]
        """The policy of the layer whose router was observed last; victims are chosen for this layer."""

    @property
    def rule(self) -> str:
        return ", ".join(sorted({pool.rule for pool in self._all}))

    def insert(self, key: ExpertKey) -> None:
        self._pools[key[0]].insert(key)

    def remove(self, key: ExpertKey) -> None:
        self._pools[key[0]].remove(key)

    def residents(self) -> set[ExpertKey]:
        return set().union(*(pool.residents() for pool in self._all))

    def observe(self, routing: Routing) -> None:
        self._running = self._pools[routing.layer]
        self._running.observe(routing)

    def of_layer(self, layer: int) -> Eviction:
        return self._pools[layer]

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        """Return victims that have slots of the size for the layer observed last; fewer if there are not enough."""
        return self._running.victims(count, shield)

    def worth(self, key: ExpertKey) -> float:
        return self._pools[key[0]].worth(key)


class FormPools(Eviction):
    """One eviction policy for the copies of each format (full or low-precision). Each policy observes every routing. A
    policy sees its residents under the keys of full copies, whatever their format."""

    name = "form pools"

    def __init__(self, policies: Mapping[int, Eviction]) -> None:
        """`policies`: {format: policy}."""
        self._pools = {form: _OneForm(policy, form) for form, policy in policies.items()}

    @property
    def rule(self) -> str:
        """The names of the rules that the formats' policies follow now, without repetitions."""
        return ", ".join(dict.fromkeys(pool.rule for pool in self._pools.values()))

    def insert(self, key: ExpertKey) -> None:
        self._pools[key[2]].insert(key)

    def remove(self, key: ExpertKey) -> None:
        self._pools[key[2]].remove(key)

    def residents(self) -> set[ExpertKey]:
        return set().union(*(pool.residents() for pool in self._pools.values()))

    def observe(self, routing: Routing) -> None:
        for pool in self._pools.values():
            pool.observe(routing)

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        """Return victims among full copies. For another format, call `victims` of the policy that `of` returns."""
        return self._pools[EXACT].victims(count, shield)

    def of(self, form: int) -> Eviction:
        return self._pools[form]

    def worth(self, key: ExpertKey) -> float:
        """Return a value that can be compared only among copies of the same format."""
        return self._pools[key[2]].worth(key)


class _OneForm(Eviction):
    """Adapts a policy to the copies of one format: the keys of these copies are converted to keys of full copies and
    back."""

    name = "one form"

    def __init__(self, policy: Eviction, form: int) -> None:
        self._policy = policy
        self._form = form

    @property
    def rule(self) -> str:
        return self._policy.rule

    def insert(self, key: ExpertKey) -> None:
        self._policy.insert(_with_form(key, EXACT))

    def remove(self, key: ExpertKey) -> None:
        self._policy.remove(_with_form(key, EXACT))

    def residents(self) -> set[ExpertKey]:
        return {_with_form(key, self._form) for key in self._policy.residents()}

    def observe(self, routing: Routing) -> None:
        self._policy.observe(routing)

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        shown = shield if self._form == EXACT else _ShieldOf(self._form, shield)
        return [_with_form(key, self._form) for key in self._policy.victims(count, shown)]

    def worth(self, key: ExpertKey) -> float:
        return self._policy.worth(_with_form(key, EXACT))


class _ShieldOf:
    """A container that contains the key of a full copy if `shield` contains the copy of the same expert in the format
    `form`."""

    def __init__(self, form: int, shield: Container[ExpertKey]) -> None:
        self._form = form
        self._shield = shield

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, tuple), key
        return (key[0], key[1], self._form) in self._shield


def _with_form(key: ExpertKey, form: int) -> ExpertKey:
    return (key[0], key[1], form)
