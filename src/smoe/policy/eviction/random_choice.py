"""Random eviction: the baseline that every other policy must exceed."""

from __future__ import annotations

import numpy as np

from smoe.policy.eviction.ranked import Ranked
from smoe.routing import Routing

SEED = 13


class RandomChoice(Ranked):
    """Evicts random residents. New random numbers are drawn for all experts when a router is observed, from a fixed
    seed; `victims` draws none."""

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
