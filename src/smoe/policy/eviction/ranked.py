"""The base class of policies that compute a value for every expert and evict the resident with the lowest value."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container
from math import inf

import numpy as np

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.base import Eviction

_SORTED = 128
"""The number of residents up to which sorting is faster than partitioning."""
_FEW = 8
"""The number of victims up to which searching them one by one is faster than sorting or partitioning."""
_SPARE = 4
"""The number of victims that the first search finds beyond those requested, because some may be in the shield."""


class Ranked(Eviction):
    """The base of policies that store residency and numbers for every expert in arrays [L, E] (layers, experts). The
    arrays grow with new layers and experts. `victims` costs O(L x E)."""

    def __init__(self, numbers: int) -> None:
        self._numbers = np.zeros((numbers, 0, 0))
        """[numbers, L, E]: the numbers that a policy stores for every expert."""
        self._is_resident = np.zeros((0, 0), dtype=bool)

    @abstractmethod
    def _values(self) -> np.ndarray:
        """Return the present value of every expert, float64 [L, E], without changing anything."""

    def insert(self, key: ExpertKey) -> None:
        self._fit(key[0], key[1] + 1)
        self._is_resident[key[0], key[1]] = True

    def remove(self, key: ExpertKey) -> None:
        self._is_resident[key[0], key[1]] = False

    def residents(self) -> set[ExpertKey]:
        layers, experts = self._is_resident.nonzero()
        return {(layer, expert, EXACT) for layer, expert in zip(layers.tolist(), experts.tolist(), strict=True)}

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        resident = self._is_resident
        if count <= 0 or not resident.size:
            return []
        return lowest_residents(self._values().reshape(-1), resident.reshape(-1), resident.shape[1], count, shield)

    def worth(self, key: ExpertKey) -> float:
        layers, width = self._is_resident.shape
        return float(self._values()[key[0], key[1]]) if key[0] < layers and key[1] < width else 0.0

    def _fit(self, layer: int, experts: int) -> bool:
        """Enlarge the arrays if they do not have this layer or this many experts. Return whether they grew."""
        layers, width = self._is_resident.shape
        if layer < layers and experts <= width:
            return False
        more = ((0, max(0, layer + 1 - layers)), (0, max(0, experts - width)))
        self._numbers = np.pad(self._numbers, ((0, 0), *more))
        self._is_resident = np.pad(self._is_resident, more)
        return True


def lowest_residents(
    values: np.ndarray, resident: np.ndarray, width: int, count: int, shield: Container[ExpertKey]
) -> list[ExpertKey]:
    """Return at most `count` residents outside `shield`, lowest value first; ties break by (layer, expert).

    `values`, `resident`: [L x E], with expert e of layer l at index l * width + e.
    """
    held = int(np.count_nonzero(resident))
    asked = min(count, held)
    while asked > 0:
        places = (divmod(place, width) for place in lowest(values, resident, asked).tolist())
        found = [key for key in ((*place, EXACT) for place in places) if key not in shield]
        if len(found) >= count or asked == held:
            return found[:count]
        asked = min(held, 2 * asked + _SPARE)
    return []


def lowest(values: np.ndarray, among: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` lowest elements of `values`, float64, among those for which `among` is true,
    ascending by value, then by index."""
    places = among.nonzero()[0]
    few = _lowest_few(values.take(places), count) if count <= min(_FEW, len(places)) else None
    if few is not None:
        return places.take(few)
    left = values.take(places)
    if len(places) > _SORTED:
        bound = np.partition(left, count - 1)[count - 1]
        low = (left <= bound).nonzero()[0]
        places, left = places[low], left[low]
    return places[left.argsort(kind="stable")[:count]]


def _lowest_few(values: np.ndarray, count: int) -> list[np.intp] | None:
    """Return the indices of the `count` lowest elements of `values`, found one by one, ascending by value, then by
    index; None if they are not all finite. Found elements become infinite."""
    found: list[np.intp] = []
    for _ in range(count):
        place = values.argmin()
        if not values.item(place) < inf:
            return None
        found.append(place)
        values[place] = inf
    return found
