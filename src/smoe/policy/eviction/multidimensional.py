"""HOBBIT's sequence-level multidimensional cache (arXiv 2411.01433, section 3.4, equation 3).

The priority of an expert is a weighted sum of four numbers between 0 and 1. The expert of lowest priority is evicted
first.

    w_lru R / T  +  w_lfu F / T  +  w_lhu H / T  +  w_fld (1 - ((l_t - l_i + l_n) % l_n) / l_n)
    T    tokens of the sequence so far             R    number of the token that last used the expert
    F    steps that used the expert                H    steps that used the expert in high precision
    l_t  the expert's layer                        l_i  the layer whose router has run last
    l_n  the number of layers

The last term (FLD, farthest layer distance) is large for experts of the next layers. The third term is large for
experts that are needed in high precision, because they cost most to load again (LHU). R, F, H and T restart with every
prompt, because a sequence's preferences differ from the model's. The paper leaves the weights to a search on recorded
traces; `smoe tune --cache` does this search.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.eviction.ranked import Ranked
from smoe.routing import Phase, Routing

WEIGHTS = (0.25, 0.125, 0.5, 0.125)
"""(w_lru, w_lfu, w_lhu, w_fld) for a model without fitted weights. They are between those fitted for a model of many
small experts and those for a model of few large ones (docs/evictions.md)."""

_USES, _HIGH_USES, _RECORDED = range(3)
"""Indices of three arrays [L, E] in `_numbers`: F, H, and w_lru R + w_lfu F + w_lhu H. The last changes only when the
expert is used."""


class Multidimensional(Ranked):
    """Ranks residents by last use, number of uses, uses in high precision, and distance of the layer. Each token of a
    prompt is a step. A decode step of a batch is one step."""

    name = "multidimensional"
    is_orderless = True
    settings = ("cache_weights", "cache_records")

    def __init__(self, weights: Sequence[float] = WEIGHTS, of_sequence: bool = True) -> None:
        """`weights`: the four weights in the order of `WEIGHTS`. `of_sequence`: whether all counts of uses and tokens
        restart with every prompt; otherwise they continue from the time when the model was loaded."""
        assert len(weights) == 4, weights
        super().__init__(numbers=3)
        self._weights = weights
        self._near = np.zeros((0, 0))
        """[l_i, l_t] the last term of the priority."""
        self._of_sequence = of_sequence
        self._tokens = 0
        """T, the number of tokens of the sequence so far."""
        self._layer = 0
        """l_i, the layer whose router has run last."""
        self._phase: Phase | None = None
        """The phase of the last observed routing."""

    @classmethod
    def of_settings(cls, settings: EvictionSettings) -> Eviction:
        return cls(settings.cache_weights or WEIGHTS, of_sequence=settings.cache_records != "model")

    def observe(self, routing: Routing) -> None:
        layer, experts, phase, rows = routing.layer, routing.experts, routing.phase, routing.top_k_index
        self._fit(layer, experts)
        if phase is Phase.DECODE:
            steps = [[e for e in (rows[0] if len(rows) == 1 else sorted(set().union(*rows))) if e != experts]]
        else:
            steps = [[e for e in row if e != experts] for row in rows]
        if phase is not self._phase or layer <= self._layer:  # a pass over the layers begins
            if phase is not self._phase and phase is Phase.PREFILL and self._of_sequence:
                self._numbers[:] = 0.0
                self._tokens = 0
            self._tokens += len(steps)
        self._layer, self._phase = layer, phase
        for token, used in enumerate(steps, start=self._tokens - len(steps) + 1):
            self._record(layer, used, routing.low, token)

    def _record(self, layer: int, used: list[int], low: Set[int], token: int) -> None:
        """Record the experts of a layer that token number `token` used. All were used in high precision, except the
        experts in `low`."""
        places = np.array(used, dtype=np.intp)
        of_last_use, of_uses, of_high_uses, _ = self._weights
        uses = self._numbers[_USES, layer]
        high_uses = self._numbers[_HIGH_USES, layer]
        used_times = uses[places] + 1.0
        used_high = high_uses[places] + ([e not in low for e in used] if low else 1.0)
        uses[places] = used_times
        high_uses[places] = used_high
        self._numbers[_RECORDED, layer][places] = of_last_use * token + of_uses * used_times + of_high_uses * used_high

    def _values(self) -> np.ndarray:
        values: np.ndarray = self._numbers[_RECORDED] / max(1, self._tokens)
        values += self._near[self._layer, :, None]
        return values

    def _fit(self, layer: int, experts: int) -> bool:
        grew = super()._fit(layer, experts)
        if grew:
            ahead = np.arange(len(self._is_resident))
            distances = (ahead[None, :] - ahead[:, None]) % len(ahead)  # [l_i, l_t]
            self._near = self._weights[3] * (1.0 - distances / len(ahead))
        return grew
