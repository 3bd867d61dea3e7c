"""A learned estimate of the next use: `smoe tune --eviction learned` trains it on recorded traces of the model.

What an expert is worth is the expected value of D^n, n the tokens until its next use and D a discount: large for what
comes soon, and nearly 0 for what comes late or never. It is estimated in two parts, from the choices alone:

* *How often it was used* of late: `HORIZONS` of fading counts and all uses, the same few weights for every expert
  (logistic regression). This alone needs no knowledge of the model and follows whatever the text does.
* *What was chosen with it*: the last choices of all layers, fading by half with every token, say what the present text
  is about, and with it which experts come next. Ridge regression of what the first part gets wrong, of low rank: every
  chosen expert adds its vector to a context of `R` numbers, and every expert has a vector that reads it.

Layers that come round soon are worth more by D for a whole round. Hearing a step costs O(E + K x R), a question
O(L x E x R).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from smoe.policy.eviction.ranked import Ranked
from smoe.routing import Phase, Routing

HORIZONS = (2, 8, 32, 128, 512)
"""Tokens after which a use counts half, in the fading counts."""
FADING = 2.0 ** (-1.0 / np.array(HORIZONS))
FEATURES = 3 + 2 * len(HORIZONS)
"""F: what `features` says of an expert."""
_PRIOR = 2.0
"""Tokens that an expert's share of the uses counts for, before any is observed."""
DISCOUNT = 0.8
"""D. From 0.5 to 0.95 misses differ by some 2 %: smaller ones are better for small caches."""
DECAY = 0.5
"""The decay of the context from token to token."""
_LEAST = 0.02
"""The least share of the first part's estimate that the second leaves: no estimate is 0."""


class NextUse(NamedTuple):
    """What was learned. Layers have their own numbers, those without experts rows of zeros."""

    rate: float
    """K / E: the uses per token of an expert that is as likely as any other."""
    weights: np.ndarray
    """[F] of the first part."""
    source: np.ndarray
    """[L, E, R] what a chosen expert adds to the context."""
    usual: np.ndarray
    """[L, R] what a token adds on average, layer by layer; the context is what differs from it."""
    target: np.ndarray
    """[L, E, R] how every expert reads the context."""
    offset: np.ndarray
    """[L, E]"""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(part.nbytes for part in self[1:])


def untrained() -> NextUse:
    """Knows no model: uses that fade by half in 32 and in 128 tokens."""
    weights = np.zeros(FEATURES)
    weights[0], weights[2 + 2 * HORIZONS.index(32)], weights[2 + 2 * HORIZONS.index(128)] = -1.0, 0.6, 0.4
    vectors, numbers = np.zeros((0, 0, 0), dtype=np.float32), np.zeros((0, 0), dtype=np.float32)
    return NextUse(0.125, weights, vectors, numbers, vectors, numbers)


def features(fading: np.ndarray, uses: np.ndarray, latest: np.ndarray, steps: int, rate: float) -> np.ndarray:
    """[..., F] what is known of experts after so many `steps` of their layer.

    `fading`: [horizons, ...] fading counts; `uses`: [...] all uses; `latest`: [...] 1 for those used in the last step.
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
    """[...] the first part's estimate of D^n from `features`: between 0 and 1."""
    estimate: np.ndarray = 1.0 / (1.0 + np.exp(-np.clip(found @ weights, -30.0, 30.0)))
    return estimate


def spread(estimate: np.ndarray) -> np.ndarray:
    """The error of estimates, if they are right on average: the unit of the second part."""
    off: np.ndarray = np.sqrt(estimate * (1.0 - estimate))
    return off


class Learned(Ranked):
    """Ranks residents by an estimate of the next use. A prompt's tokens are steps one after the other; a step of a
    batch is one token, whose rows together are the context."""

    name = "learned"

    def __init__(self, learned: NextUse | None = None) -> None:
        """None: as for a model without training."""
        super().__init__(numbers=len(HORIZONS) + 2)
        """The fading counts, all uses, and the first part's estimate."""
        self._learned = learned if learned is not None else untrained()
        layers, width, rank = self._learned.source.shape
        self._context = np.zeros((layers, rank), dtype=np.float32)
        """[L, R] what the choices of every layer have added."""
        self._steps: dict[int, int] = {}
        """The steps of every layer observed so far."""
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
        """One step chose these experts; returns them, each once."""
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
        """The first part, for the experts of a layer, which only its own steps change."""
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
