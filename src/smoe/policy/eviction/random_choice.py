"""Any resident, by lot: what a policy that learns anything at all has to beat."""

from __future__ import annotations

import numpy as np

from smoe.policy.eviction.ranked import Ranked
from smoe.routing import Routing

SEED = 13


class RandomChoice(Ranked):
    """Lots are drawn again whenever a router has spoken, for all experts, from a fixed seed: asking draws nothing."""

    name = "random"

    def __init__(self, seed: int = SEED) -> None:
        super().__init__(numbers=1)
        self._chance = np.random.default_rng(seed)

    def observe(self, routing: Routing) -> None:
        self._fit(routing.layer, routing.experts)
        self._chance.random(out=self._numbers)

    def _values(self) -> np.ndarray:
        lots: np.ndarray = self._numbers[0]
        return lots
