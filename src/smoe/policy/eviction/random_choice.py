"""Random eviction: a lower limit for comparisons, which every other policy should exceed."""

from __future__ import annotations

import numpy as np

from smoe.policy.eviction.ranked import Ranked
from smoe.routing import Routing

SEED = 13


class RandomChoice(Ranked):
    """Evicts random residents. Whenever a router is observed, every expert gets a new random number, from a generator
    with a fixed seed. The residents with the lowest numbers are evicted."""

    name = "random"
    only_replayed = "is what others are compared with"

    def __init__(self, seed: int = SEED) -> None:
        super().__init__(numbers=1)
        self._chance = np.random.default_rng(seed)

    def observe(self, routing: Routing) -> None:
        self._fit(routing.layer, routing.experts)
        self._chance.random(out=self._numbers)

    def _values(self) -> np.ndarray:
        lots: np.ndarray = self._numbers[0]
        return lots
