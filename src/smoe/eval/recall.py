"""How often the experts that were named are those that were chosen: recall by OD-MoE's equations 2 and 3, and more.

    Q prompts, N tokens, L layers, k chosen of each; c(q, n, l) of them were named; A(q, n): there is such a token

*Whole layer* is the share of layers of which all k were named: one that is missing stalls a layer as several do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smoe.prediction.activation_path import NO_EXPERT

_DIGITS = 6
"""The digits of a share in JSON: there are never a million choices."""


def by_token(right: np.ndarray, exists: np.ndarray, wanted: int) -> np.ndarray:
    """Equation 2: recall(n) [N] for c [Q, N, L], A [Q, N] and `wanted` = k L; NaN where no prompt has a token n."""
    counted = exists.sum(axis=0) * wanted
    found = (right * exists[..., None]).sum(axis=(0, 2))
    share: np.ndarray = np.divide(found, counted, out=np.full(len(counted), np.nan), where=counted > 0)
    return share


def overall(right: np.ndarray, exists: np.ndarray, wanted: int) -> float:
    """Equation 3: recall over all tokens, for c [Q, N, L], A [Q, N] and `wanted` = k L."""
    return float((right * exists[..., None]).sum() / (wanted * exists.sum()))


def named_right(chosen: np.ndarray, named: np.ndarray, most: np.ndarray) -> np.ndarray:
    """c [N, L]: how many of `chosen` [N, L, K] are among the first `most` [L] of `named` [N, L, M].

    `NO_EXPERT` in either is no expert. No expert is named twice.
    """
    is_real = (np.arange(named.shape[-1]) < most[:, None]) & (named != NO_EXPERT)  # [N, L, M]
    hit = (named[..., :, None] == chosen[..., None, :]).any(axis=-1) & is_real
    right: np.ndarray = hit.sum(axis=-1)
    return right


@dataclass(frozen=True)
class Recall:
    """How one guesser did."""

    right: np.ndarray
    """[S + 1, Q, N, L] c of equations 2 and 3, with 0 to S experts named in addition to those the layer chooses."""
    exists: np.ndarray
    """[Q, N] A of equations 2 and 3."""
    top_k: np.ndarray
    """[L]"""
    guessed: np.ndarray
    """[L], True for layers with a prediction; the others do not count."""
    has_spares: bool
    """False of a guesser that can name no more than a layer chooses."""

    @property
    def overall(self) -> float:
        """Equation 3."""
        return self.overall_by_spares[0]

    @property
    def whole_layer(self) -> float:
        """Share of tokens and layers all of whose experts were named."""
        return self.whole_layer_by_spares[0]

    @property
    def overall_by_spares(self) -> list[float]:
        """Equation 3 with 0, 1, ... S more experts named."""
        return [overall(right[..., self.guessed], self.exists, self._wanted) for right in self._rights]

    @property
    def whole_layer_by_spares(self) -> list[float]:
        """`whole_layer` with 0, 1, ... S more experts named."""
        pairs = self.exists.sum() * self.guessed.sum()
        return [
            float(((right == self.top_k)[..., self.guessed] * self.exists[..., None]).sum() / pairs)
            for right in self._rights
        ]

    @property
    def by_token(self) -> np.ndarray:
        """Equation 2: [N]."""
        return by_token(self.right[0][..., self.guessed], self.exists, self._wanted)

    @property
    def by_layer(self) -> list[float | None]:
        """[L]; None for layers without predictions."""
        counted = self.exists.sum() * self.top_k
        found = (self.right[0] * self.exists[..., None]).sum(axis=(0, 1))
        return [
            float(found[n] / counted[n]) if is_guessed else None for n, is_guessed in enumerate(self.guessed.tolist())
        ]

    @property
    def by_prompt(self) -> list[float]:
        """Equation 3 for every prompt: how far they lie apart."""
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
    """Takes in what was named, prompt by prompt."""

    def __init__(self, top_k: Sequence[int], tokens: int, spares: int) -> None:
        """`top_k` of every layer; `tokens`: N, of a prompt at most; `spares`: S."""
        self._top_k = np.array(top_k)
        self._tokens = tokens
        self._spares = spares
        self._right: list[np.ndarray] = []
        self._exists: list[np.ndarray] = []
        self._guessed = np.zeros(len(self._top_k), dtype=bool)
        self._has_spares = False

    def add(self, chosen: np.ndarray, named: np.ndarray) -> None:
        """The next prompt: what was `chosen` [n, L, K] and `named`, best first [n, L, K + S]; `NO_EXPERT` fills up.

        n is at least 1.
        """
        right = np.zeros((self._spares + 1, self._tokens, len(self._top_k)), dtype=np.int16)
        for spares in range(self._spares + 1):
            right[spares, : len(chosen)] = named_right(chosen, named, self._top_k + spares)
        self._right.append(right)
        self._exists.append(np.arange(self._tokens) < len(chosen))
        is_predicted = named != NO_EXPERT
        self._guessed |= is_predicted.any(axis=(0, 2))
        self._has_spares |= bool((is_predicted.sum(axis=-1) > self._top_k).any())

    def finished(self) -> Recall:
        """What came of it; at least one prompt must have been added."""
        right, exists = np.stack(self._right, axis=1), np.stack(self._exists)
        return Recall(right, exists, self._top_k, self._guessed, self._has_spares)


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, _DIGITS)
