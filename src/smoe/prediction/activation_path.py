"""Expert activation paths: the routers' choices for a token, layer by layer (DuoServe, equation 1).

    token n   | E of layer 0 | E of layer 1 | ... |     -> [N, L, K]

Predictors that see only the history of routing are fitted on such paths, and read the current path while a token passes
through the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

NO_EXPERT = -1
"""Fills a path in layers that choose fewer experts than the widest."""


class RoutedLayer(NamedTuple):
    """The sizes of one layer's routing."""

    layer: int
    """The layer's number in the model."""
    experts: int
    """E, the number of experts."""
    top_k: int
    """K, the experts chosen for each token."""


class Paths(NamedTuple):
    """Paths of many tokens; the tokens of a sequence are in their order."""

    layers: tuple[RoutedLayer, ...]
    """The layers, ascending."""
    chosen: np.ndarray
    """[N, L, K] int64 chosen experts; `NO_EXPERT` beyond a layer's own K."""
    sequence: np.ndarray
    """[N] the sequence number of each token."""

    def of_sequences(self) -> Iterator[np.ndarray]:
        """Yield [n, L, K] for every sequence, in order of first appearance."""
        _, first = np.unique(self.sequence, return_index=True)
        for place in sorted(first):
            yield self.chosen[self.sequence == self.sequence[place]]

    def split(self, share: float) -> tuple[Paths, Paths]:
        """Divide the paths into the first part and the last `share` of the tokens; both have at least one token."""
        cut = min(max(1, round(len(self.chosen) * (1 - share))), len(self.chosen) - 1)
        return self._replace(chosen=self.chosen[:cut], sequence=self.sequence[:cut]), self._replace(
            chosen=self.chosen[cut:], sequence=self.sequence[cut:]
        )


def joined(parts: Sequence[Paths]) -> Paths:
    """Concatenate paths of one model; sequences of different parts get different numbers."""
    first, numbers = 0, []
    for part in parts:
        numbers.append(part.sequence - part.sequence.min(initial=0) + first)
        first = int(numbers[-1].max(initial=first - 1)) + 1
    return Paths(parts[0].layers, np.concatenate([part.chosen for part in parts]), np.concatenate(numbers))


def multi_hot(chosen: np.ndarray, experts: int) -> np.ndarray:
    """Convert [..., K] indices to [..., E] float32, with 1 for chosen experts."""
    hot = np.zeros((*chosen.shape[:-1], experts + 1), dtype=np.float32)  # the last column is for NO_EXPERT
    np.put_along_axis(hot, np.where(chosen == NO_EXPERT, experts, chosen), 1.0, axis=-1)
    return hot[..., :experts]
