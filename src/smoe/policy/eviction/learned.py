"""The eviction policy `learned`: ranks experts by a trained estimate of their next use. `smoe tune --eviction learned`
trains it on traces.

An expert's value is the expectation of D^n, where n is the number of tokens until its next use and D is a constant
below 1: the value is large for an early use and nearly 0 for a late one. The estimate has two parts, both computed from
the routers' choices only:

* *How often the expert was used*: the inputs are fading counts with the half-lives `HORIZONS`, and the number of all
  uses. Logistic regression has the same few weights for every expert. This part is independent of the model and adapts
  to any text.
* *Which experts were chosen with it*: the last choices of all layers, which lose half their weight with every token,
  characterise the current text and so the next experts. This part is a ridge regression of low rank, trained on the
  error of the first part. Every chosen expert adds its vector to a context of R numbers, and the scalar product of the
  context with a second vector of each expert is that expert's estimate.

The value of a layer that runs later is lower, by a factor of D for a whole pass over the layers. `observe` costs O(E +
K x R), `victims` O(L x E x R).

Letters: F inputs of the first part, L layers, E experts, K experts that a token chooses, R numbers of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from smoe.policy.eviction.ranked import Ranked
from smoe.routing import Phase, Routing

HORIZONS = (2, 8, 32, 128, 512)
"""The half-lives of the fading counts: the numbers of tokens after which a use has half its weight."""
FADING = 2.0 ** (-1.0 / np.array(HORIZONS))
FEATURES = 3 + 2 * len(HORIZONS)
"""F, the number of inputs of the first part for each expert (`features`)."""
_PRIOR = 2.0
"""The number of tokens with average use that are added to each expert's history, so that short histories count less."""
DISCOUNT = 0.8
"""The constant D. Values from 0.5 to 0.95 change the misses by about 2 %; smaller values are better for small
caches."""
DECAY = 0.5
"""The factor by which the context, a sum over the chosen experts, shrinks from token to token."""
_LEAST = 0.02
"""The smallest fraction of the first part's estimate that remains when the second part lowers it, so that no estimate
becomes 0."""


class NextUse(NamedTuple):
    """The trained parameters. The first index of an array is the layer's number; layers without experts have rows of
    zeros."""

    rate: float
    """K / E, how often a token uses an average expert."""
    weights: np.ndarray
    """[F] the weights of the first part."""
    source: np.ndarray
    """[L, E, R] the vector that each expert adds to the context when it is chosen."""
    usual: np.ndarray
    """[L, R] the mean vector that a token adds to the context. The context contains differences from this mean."""
    target: np.ndarray
    """[L, E, R] the vector of each expert whose scalar product with the context is the second part's estimate."""
    offset: np.ndarray
    """[L, E] a constant that is added to the second part's estimate."""

    @property
    def nbytes(self) -> int:
        """The size of all arrays, in bytes."""
        return sum(part.nbytes for part in self[1:])


def untrained() -> NextUse:
    """Return parameters that suit any model: the first part uses the fading counts with half-lives of 32 and 128
    tokens, and there is no second part."""
    weights = np.zeros(FEATURES)
    weights[0], weights[2 + 2 * HORIZONS.index(32)], weights[2 + 2 * HORIZONS.index(128)] = -1.0, 0.6, 0.4
    vectors, numbers = np.zeros((0, 0, 0), dtype=np.float32), np.zeros((0, 0), dtype=np.float32)
    return NextUse(0.125, weights, vectors, numbers, vectors, numbers)


def features(fading: np.ndarray, uses: np.ndarray, latest: np.ndarray, steps: int, rate: float) -> np.ndarray:
    """Return [..., F], the inputs of the first part for experts of one layer after `steps` steps.

    `fading`: [horizons, ...] fading counts. `uses`: [...] numbers of all uses. `latest`: [...] 1 for experts used in
    the last step, else 0. `rate`: `NextUse.rate`.
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
    """Return [...], the first part's estimate of D^n, between 0 and 1. `found`: [..., F] the inputs; `weights`: [F]."""
    estimate: np.ndarray = 1.0 / (1.0 + np.exp(-np.clip(found @ weights, -30.0, 30.0)))
    return estimate


def spread(estimate: np.ndarray) -> np.ndarray:
    """Return the standard deviation of a random variable that is 0 or 1 and whose mean is `estimate`. The second part's
    estimate is a multiple of it."""
    off: np.ndarray = np.sqrt(estimate * (1.0 - estimate))
    return off


class Learned(Ranked):
    """Ranks residents by an estimate of their next use. Each token of a prompt is a step. A decode step of a batch is
    one step, and the mean of its rows updates the context."""

    name = "learned"
    is_orderless = True
    learned = "smoe.load.next_use:TrainedNextUse"
    settings = ("next_use",)

    def __init__(self, next_use: NextUse | None = None) -> None:
        """`next_use`: the trained parameters; None for a model without training."""
        super().__init__(numbers=len(HORIZONS) + 2)
        """The fading counts, all uses, and the first part's estimate."""
        self._learned = next_use if next_use is not None else untrained()
        layers, width, rank = self._learned.source.shape
        self._context = np.zeros((layers, rank), dtype=np.float32)
        """[L, R] the sum of what each layer's choices have added to the context, with decay."""
        self._steps: dict[int, int] = {}
        """The number of observed steps of each layer."""
        self._layer = 0
        """The layer observed last."""
        if layers:
            self._fit(layers - 1, width)

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
        """Record one step of a layer. `rows`: for each row of the step, the experts that it has chosen. Return the
        chosen experts, each once."""
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
        """Compute the first part's estimate for all experts of a layer, after a step of this layer that used the
        experts `used`."""
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
