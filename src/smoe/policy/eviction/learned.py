"""The eviction policy `learned`: a trained estimate of the next use (`smoe tune --eviction learned` trains it on
traces).

An expert's value is the expectation of D^n, where n is the number of tokens until its next use and D a discount: large
for early uses, nearly 0 for late ones or none. The estimate has two parts, both from the routers' choices only:

* *How often the expert was used* recently: `HORIZONS` of fading counts and all uses, with the same few weights for
  every expert (logistic regression). This part needs no knowledge of the model and adapts to any text.
* *Which experts were chosen with it*: the last choices of all layers, fading by half with every token, characterise the
  current text, and so the next experts. This is a ridge regression of the first part's error, of low rank: every chosen
  expert adds its vector to a context of `R` numbers, and every expert has a vector that reads the context.

Layers that run soon have a higher value: D for a whole round of the layers. `observe` costs O(E + K x R), `victims` O(L
x E x R).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.eviction.ranked import Ranked
from smoe.routing import Phase, Routing

HORIZONS = (2, 8, 32, 128, 512)
"""The numbers of tokens after which a use counts half, in the fading counts."""
FADING = 2.0 ** (-1.0 / np.array(HORIZONS))
FEATURES = 3 + 2 * len(HORIZONS)
"""F, the number of inputs that `features` computes for an expert."""
_PRIOR = 2.0
"""The weight of an expert's prior share of the uses, in tokens."""
DISCOUNT = 0.8
"""The discount D per step. Values from 0.5 to 0.95 change the misses by some 2 %; small caches prefer smaller
values."""
DECAY = 0.5
"""The decay of the context from token to token."""
_LEAST = 0.02
"""The least share of the first part's estimate that the second part leaves: no estimate is 0."""


class NextUse(NamedTuple):
    """The learned parameters. Layers have their own numbers; layers without experts have rows of zeros."""

    rate: float
    """K / E, the uses per token of an average expert."""
    weights: np.ndarray
    """[F] weights of the first part."""
    source: np.ndarray
    """[L, E, R] vectors that a chosen expert adds to the context."""
    usual: np.ndarray
    """[L, R] the average addition of a token, by layer; the context holds the differences from it."""
    target: np.ndarray
    """[L, E, R] vectors that read the context for each expert."""
    offset: np.ndarray
    """[L, E] constants of the second part."""

    @property
    def nbytes(self) -> int:
        """The memory of the parameters, in bytes."""
        return sum(part.nbytes for part in self[1:])


def untrained() -> NextUse:
    """Return parameters for any model: uses that fade by half in 32 and in 128 tokens."""
    weights = np.zeros(FEATURES)
    weights[0], weights[2 + 2 * HORIZONS.index(32)], weights[2 + 2 * HORIZONS.index(128)] = -1.0, 0.6, 0.4
    vectors, numbers = np.zeros((0, 0, 0), dtype=np.float32), np.zeros((0, 0), dtype=np.float32)
    return NextUse(0.125, weights, vectors, numbers, vectors, numbers)


def features(fading: np.ndarray, uses: np.ndarray, latest: np.ndarray, steps: int, rate: float) -> np.ndarray:
    """Return [..., F] inputs of the first part after `steps` steps of the experts' layer.

    `fading`: [horizons, ...] fading counts; `uses`: [...] all uses; `latest`: [...] 1 for experts used in the last
    step.
    """
    found = np.empty((*uses.shape, FEATURES))
    found[..., 0] = 1.0
    found[..., 1] = latest
    lengths = (1.0 - FADING**steps) / (1.0 - FADING)
    for number, (count, length) in enumerate(zip(fading, lengths, strict=True)):
        share = (count + _PRIOR * rate) / (length + _PRIOR)
        np.log(share / rate, out=found[..., 2 + 2 * number])
        found[..., 3 + 2 * number] = share
    np.log((uses + _PRIOR * rate) / (steps + _PRIOR) / rate, out=found[..., -1])
    return found


def chance(found: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return [...] the first part's estimate of D^n from `features`, between 0 and 1."""
    estimate: np.ndarray = 1.0 / (1.0 + np.exp(-np.clip(found @ weights, -30.0, 30.0)))
    return estimate


def spread(estimate: np.ndarray) -> np.ndarray:
    """Return the standard deviation of unbiased estimates, which is the unit of the second part."""
    off: np.ndarray = np.sqrt(estimate * (1.0 - estimate))
    return off


class Learned(Ranked):
    """Ranks residents by an estimate of the next use. Each token of a prompt is a step; a decode step of a batch is one
    step, whose rows together update the context."""

    name = "learned"
    is_orderless = True
    is_trained = True
    settings = ("next_use",)

    def __init__(self, learned: NextUse | None = None) -> None:
        """`learned`: None for a model without training."""
        super().__init__(numbers=len(HORIZONS) + 2)
        """The fading counts, all uses, and the first part's estimate."""
        self._learned = learned if learned is not None else untrained()
        layers, width, rank = self._learned.source.shape
        self._context = np.zeros((layers, rank), dtype=np.float32)
        """[L, R] the sum of what each layer's choices have added."""
        self._steps: dict[int, int] = {}
        """The number of observed steps of each layer."""
        self._layer = 0
        """The layer observed last."""
        if layers:
            self._fit(layers - 1, width)

    @classmethod
    def of_settings(cls, settings: EvictionSettings) -> Eviction:
        return cls(settings.next_use)

    def observe(self, routing: Routing) -> None:
        layer, experts = routing.layer, routing.experts
        self._fit(layer, experts)
        self._layer = layer
        rows = [chosen for row in routing.top_k_index if (chosen := [e for e in row if e != experts])]
        used: list[int] = []
        for step in [rows] if routing.phase is Phase.DECODE else [[row] for row in rows]:
            if step:
                used = self._record(layer, step)
        if used:
            self._estimate(layer, used)

    def _record(self, layer: int, rows: Sequence[Sequence[int]]) -> list[int]:
        """Record one step that chose these experts. Return the experts, each once."""
        used = list(rows[0]) if len(rows) == 1 else sorted(set().union(*rows))
        fading = self._numbers[: len(HORIZONS), layer]
        fading *= FADING[:, None]
        fading[:, used] += 1.0
        self._numbers[len(HORIZONS), layer, used] += 1.0
        self._steps[layer] = self._steps.get(layer, 0) + 1
        if layer < len(self._context):
            source, context = self._learned.source[layer], self._context[layer]
            added = source[[expert for row in rows for expert in row]].sum(axis=0) / len(rows)
            context *= DECAY
            context += (1.0 - DECAY) * (added - self._learned.usual[layer])
        return used

    def _estimate(self, layer: int, used: Sequence[int]) -> None:
        """Compute the first part for a layer's experts; only steps of this layer change it."""
        fading, uses = self._numbers[: len(HORIZONS), layer], self._numbers[len(HORIZONS), layer]
        latest = np.zeros(len(uses))
        latest[used] = 1.0
        found = features(fading, uses, latest, self._steps[layer], self._learned.rate)
        self._numbers[-1, layer] = chance(found, self._learned.weights)

    def _values(self) -> np.ndarray:
        values: np.ndarray = self._numbers[-1].copy()
        layers, width, rank = self._learned.target.shape
        if layers:
            known = values[:layers, :width]
            read = self._learned.target.reshape(-1, rank) @ self._context.sum(axis=0)
            off = spread(known) * (read.reshape(layers, width) + self._learned.offset)
            np.maximum(known + off, _LEAST * known, out=known)
        ahead = (np.arange(len(values)) - self._layer - 1) % len(values)
        values *= (DISCOUNT ** (ahead / len(values)))[:, None]
        return values
