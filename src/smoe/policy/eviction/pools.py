"""Slots in several pools, each with an eviction policy of its own: by layer, by the size of the slots, or by the format
of the copies in them.

Pools by size or format are no choice: a copy can only have a slot that it fits. Pools by layer are one (`pools` layer),
so that no layer starves another: in one global pool a layer whose experts score alike, or are used in turn, loses its
slots to the others. There every layer has an equal share. A layer that has it gives up its own experts; one that has
less takes from those that have more, the fullest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.base import Eviction
from smoe.routing import Routing


class LayerPools(Eviction):
    """A policy of its own for every layer, each with `share` slots."""

    name = "layer pools"

    def __init__(self, make: Callable[[], Eviction], share: int) -> None:
        assert share > 0, share
        self._make = make
        self._share = share
        self._pools: dict[int, Eviction] = {}
        self._sizes: Counter[int] = Counter()
        self._running = 0
        """The layer whose router was observed last: victims are chosen for it."""

    @property
    def rule(self) -> str:
        """Those of the layers, each once."""
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
        """First what others have beyond their share, as far as this layer lacks of its own; then its own; then any."""
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
        """The other layers, the fullest first."""
        sizes = self._sizes
        return sorted((layer for layer in self._pools if layer != self._running), key=lambda n: (-sizes[n], n))

    def _pool(self, layer: int) -> Eviction:
        if layer not in self._pools:
            self._pools[layer] = self._make()
        return self._pools[layer]


class SizePools(Eviction):
    """A policy of its own for the layers of each slot size: a layer's victims have slots that its experts fit."""

    name = "size pools"

    def __init__(self, pools: Mapping[int, Eviction]) -> None:
        """`pools`: by layer; the same object for layers that share slots."""
        self._pools = pools
        self._all = list({id(pool): pool for pool in pools.values()}.values())
        self._running = self._all[0]
        """The pool of the layer whose router was observed last: victims are chosen for it."""

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
        """Victims of the running layer's pool only: fewer where it has no more."""
        return self._running.victims(count, shield)

    def worth(self, key: ExpertKey) -> float:
        return self._pools[key[0]].worth(key)


class FormPools(Eviction):
    """A policy of its own for the copies of each format. Each hears every routing; none ever sees a format: to a policy
    all its residents are exact."""

    name = "form pools"

    def __init__(self, policies: Mapping[int, Eviction]) -> None:
        """`policies`: by format."""
        self._pools = {form: _OneForm(policy, form) for form, policy in policies.items()}

    @property
    def rule(self) -> str:
        """Those of the formats, each once."""
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
        """Copies of the experts' own format; those of others are asked of `of`."""
        return self._pools[EXACT].victims(count, shield)

    def of(self, form: int) -> Eviction:
        return self._pools[form]

    def worth(self, key: ExpertKey) -> float:
        """Comparable among copies of one format."""
        return self._pools[key[2]].worth(key)


class _OneForm(Eviction):
    """What ranks the copies of one format, by a policy that takes them for exact ones."""

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
    """The copies of one format in a shield, as exact ones."""

    def __init__(self, form: int, shield: Container[ExpertKey]) -> None:
        self._form = form
        self._shield = shield

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, tuple), key
        return (key[0], key[1], self._form) in self._shield


def _with_form(key: ExpertKey, form: int) -> ExpertKey:
    return (key[0], key[1], form)
