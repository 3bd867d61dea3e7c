"""Expert activation paths: what every router chose for a token, layer by layer (DuoServe, equation 1).

    token n   | E of layer 0 | E of layer 1 | ... |     -> [N, L, K]

Predictors that see only the history of routing are fitted on such paths, and read one while a token passes the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

NO_EXPERT = -1
"""In a path, of a layer that chooses fewer experts than the widest."""


class RoutedLayer(NamedTuple):
    """What the router of one layer can say."""

    layer: int
    """The model's own number."""
    experts: int
    """E"""
    top_k: int
    """K"""


class Paths(NamedTuple):
    """Paths of many tokens, those of a sequence in their order."""

    layers: tuple[RoutedLayer, ...]
    """Ascending."""
    chosen: np.ndarray
    """[N, L, K] int64; `NO_EXPERT` beyond a layer's own K."""
    sequence: np.ndarray
    """[N] number of the sequence."""

    def of_sequences(self) -> Iterator[np.ndarray]:
        """[n, L, K] of every sequence, in order of first appearance."""
        _, first = np.unique(self.sequence, return_index=True)
        for place in sorted(first):
            yield self.chosen[self.sequence == self.sequence[place]]

    def split(self, share: float) -> tuple[Paths, Paths]:
        """The beginning, and the last `share` of the tokens; both have at least one."""
        cut = min(max(1, round(len(self.chosen) * (1 - share))), len(self.chosen) - 1)
        return self._replace(chosen=self.chosen[:cut], sequence=self.sequence[:cut]), self._replace(
            chosen=self.chosen[cut:], sequence=self.sequence[cut:]
        )


def joined(parts: Sequence[Paths]) -> Paths:
    """One after the other, of one model; sequences of different parts are different ones."""
    first, numbers = 0, []
    for part in parts:
        numbers.append(part.sequence - part.sequence.min(initial=0) + first)
        first = int(numbers[-1].max(initial=first - 1)) + 1
    return Paths(parts[0].layers, np.concatenate([part.chosen for part in parts]), np.concatenate(numbers))


def multi_hot(chosen: np.ndarray, experts: int) -> np.ndarray:
    """[..., K] indices -> [..., E] with 1 where an expert was chosen, as float32."""
    hot = np.zeros((*chosen.shape[:-1], experts + 1), dtype=np.float32)  # the last column is no expert's
    np.put_along_axis(hot, np.where(chosen == NO_EXPERT, experts, chosen), 1.0, axis=-1)
    return hot[..., :experts]
