"""Computes the recall of predicted experts by OD-MoE's equations 2 and 3, and similar measures.

    Q prompts, N tokens, L layers, K experts chosen in each, S experts predicted in addition (spares)
    c(q, n, l): how many of the K experts were predicted      A(q, n): whether prompt q has a token n

*Whole layer* is the fraction of layers of which all K experts are predicted: one missing expert delays a layer as much
as several do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smoe.prediction.activation_path import NO_EXPERT

_DIGITS = 6
"""The number of decimal digits of a fraction in JSON. More are not needed, because there are fewer than a million
choices."""


def by_token(right: np.ndarray, exists: np.ndarray, wanted: int) -> np.ndarray:
    """Return [N], the recall of each token number n by OD-MoE's equation 2; NaN if no prompt has a token n.

    `right`: [Q, N, L], c, how many chosen experts were predicted. `exists`: [Q, N], A, whether prompt q has a token n.
    `wanted`: K L, the number of experts chosen for a token in all layers.
    """
    counted = exists.sum(axis=0) * wanted
    found = (right * exists[..., None]).sum(axis=(0, 2))
    share: np.ndarray = np.divide(found, counted, out=np.full(len(counted), np.nan), where=counted > 0)
    return share


def overall(right: np.ndarray, exists: np.ndarray, wanted: int) -> float:
    """Return the recall over all tokens by OD-MoE's equation 3: the fraction of the chosen experts that were predicted.

    The arguments are those of `by_token`.
    """
    return float((right * exists[..., None]).sum() / (wanted * exists.sum()))


def named_right(chosen: np.ndarray, named: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Return c [N, L], how many chosen experts were predicted. `chosen`: [N, L, K] experts; `named`: [N, L, M]
    predicted experts, best first, of which the first `most` [L] count.

    `NO_EXPERT` counts as no expert in both arrays. No expert may be predicted twice.
    """
    is_real = (np.arange(named.shape[-1]) < most[:, None]) & (named != NO_EXPERT)  # [N, L, M]
    hit = (named[..., :, None] == chosen[..., None, :]).any(axis=-1) & is_real
    right: np.ndarray = hit.sum(axis=-1)
    return right


@dataclass(frozen=True)
class Recall:
    """How many of the chosen experts one predictor has predicted. The module explains the letters c, A, Q, N, L, K and
    S."""

    right: np.ndarray
    """[S + 1, Q, N, L] c of equations 2 and 3, for 0 to S predicted experts in addition to the layer's top-k."""
    exists: np.ndarray
    """[Q, N] A of equations 2 and 3."""
    top_k: np.ndarray
    """[L] the number of experts that each layer chooses."""
    guessed: np.ndarray
    """[L] whether the layer was predicted. Layers without predictions do not count."""
    has_spares: bool
    """Whether the predictor can predict more experts than a layer's top-k."""

    @property
    def overall(self) -> float:
        """The recall over all tokens by equation 3."""
        return self.overall_by_spares[0]

    @property
    def whole_layer(self) -> float:
        """The fraction of (token, layer) pairs all of whose experts were predicted."""
        return self.whole_layer_by_spares[0]

    @property
    def overall_by_spares(self) -> list[float]:
        """The recall by equation 3 with 0, 1, ... S experts predicted in addition."""
        return [overall(right[..., self.guessed], self.exists, self._wanted) for right in self._rights]

    @property
    def whole_layer_by_spares(self) -> list[float]:
        """`whole_layer` with 0, 1, ... S experts predicted in addition."""
        pairs = self.exists.sum() * self.guessed.sum()
        return [
            float(((right == self.top_k)[..., self.guessed] * self.exists[..., None]).sum() / pairs)
            for right in self._rights
        ]

    @property
    def by_token(self) -> np.ndarray:
        """[N] the recall of each token number by equation 2."""
        return by_token(self.right[0][..., self.guessed], self.exists, self._wanted)

    @property
    def by_layer(self) -> list[float | None]:
        """[L] the recall of each layer; None for layers without predictions."""
        counted = self.exists.sum() * self.top_k
        found = (self.right[0] * self.exists[..., None]).sum(axis=(0, 1))
        return [
            float(found[n] / counted[n]) if is_guessed else None for n, is_guessed in enumerate(self.guessed.tolist())
        ]

    @property
    def by_prompt(self) -> list[float]:
        """The recall of each prompt by equation 3, which shows how much prompts differ."""
        return [
            overall(right[None][..., self.guessed], exists[None], self._wanted)
            for right, exists in zip(self.right[0], self.exists, strict=True)
        ]

    @property
    def _wanted(self) -> int:
        return int(self.top_k[self.guessed].sum())

    @property
    def _rights(self) -> np.ndarray:
        return self.right if self.has_spares else self.right[:1]

    def as_json(self) -> dict[str, Any]:
        return {
            "recall": _rounded(self.overall),
            "whole_layer": _rounded(self.whole_layer),
            "recall_by_spares": [*map(_rounded, self.overall_by_spares)],
            "whole_layer_by_spares": [*map(_rounded, self.whole_layer_by_spares)],
            "layers_guessed": int(self.guessed.sum()),
            "by_prompt": [*map(_rounded, self.by_prompt)],
            "by_layer": [*map(_rounded, self.by_layer)],
            "by_token": [_rounded(None if np.isnan(share) else float(share)) for share in self.by_token],
        }


class Tally:
    """Collects the predictions of one predictor, prompt by prompt, for a `Recall`."""

    def __init__(self, top_k: Sequence[int], tokens: int, spares: int) -> None:
        """`top_k`: K of every layer; `tokens`: N, the largest number of tokens of a prompt; `spares`: S."""
        self._top_k = np.array(top_k)
        self._tokens = tokens
        self._spares = spares
        self._right: list[np.ndarray] = []
        self._exists: list[np.ndarray] = []
        self._guessed = np.zeros(len(self._top_k), dtype=bool)
        self._has_spares = False

    def add(self, chosen: np.ndarray, named: np.ndarray) -> None:
        """Add the next prompt. `chosen`: [n, L, K] experts; `named`: [n, L, K + S] predicted experts, best first.
        `NO_EXPERT` fills unused entries. n must be at least 1."""
        right = np.zeros((self._spares + 1, self._tokens, len(self._top_k)), dtype=np.int16)
        for spares in range(self._spares + 1):
            right[spares, : len(chosen)] = named_right(chosen, named, self._top_k + spares)
        self._right.append(right)
        self._exists.append(np.arange(self._tokens) < len(chosen))
        is_predicted = named != NO_EXPERT
        self._guessed |= is_predicted.any(axis=(0, 2))
        self._has_spares |= bool((is_predicted.sum(axis=-1) > self._top_k).any())

    def finished(self) -> Recall:
        """Return the recall over all added prompts, of which there must be at least one."""
        right, exists = np.stack(self._right, axis=1), np.stack(self._exists)
        return Recall(right, exists, self._top_k, self._guessed, self._has_spares)


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, _DIGITS)
