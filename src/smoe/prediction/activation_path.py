"""Expert activation paths: the experts that the routers chose for a token, layer by layer (DuoServe, equation 1).

    token n   | E of layer 0 | E of layer 1 | ... |     -> [N, L, K]

Letters: N tokens, L layers, E experts of a layer, K experts chosen for a token. Predictors that use only the history of
routing are fitted on such paths. While a token passes through the layers, they use its path so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

NO_EXPERT = -1
"""Fills the path in layers that choose fewer experts than the widest layer."""


class RoutedLayer(NamedTuple):
    """The number of a layer, and the sizes of its routing."""

    layer: int
    """The layer's number in the model."""
    experts: int
    """E, the number of experts."""
    top_k: int
    """K, the number of experts that are chosen for each token."""


class Paths(NamedTuple):
    """The experts that were chosen for many tokens in every layer. The tokens of one sequence are in the order of the
    text."""

    layers: tuple[RoutedLayer, ...]
    """The layers, ascending."""
    chosen: np.ndarray
    """[N, L, K] int64, the chosen experts. A layer with a smaller K than the widest layer is filled with
    `NO_EXPERT`."""
    sequence: np.ndarray
    """[N] the sequence number of each token."""

    def of_sequences(self) -> Iterator[np.ndarray]:
        """Yield the paths [n, L, K] of each sequence, in the order of their first tokens."""
        _, first = np.unique(self.sequence, return_index=True)
        for place in sorted(first):
            yield self.chosen[self.sequence == self.sequence[place]]

    def split(self, share: float) -> tuple[Paths, Paths]:
        """Return two sets of paths: those of the first tokens, and those of the last tokens. `share`: the fraction of
        the tokens in the second set. Each set has at least one token."""
        cut = min(max(1, round(len(self.chosen) * (1 - share))), len(self.chosen) - 1)
        return self._replace(chosen=self.chosen[:cut], sequence=self.sequence[:cut]), self._replace(
            chosen=self.chosen[cut:], sequence=self.sequence[cut:]
        )


def joined(parts: Sequence[Paths]) -> Paths:
    """Return the paths of several traces of one model, one after the other, as one object. Sequences of different
    traces get different numbers."""
    first, numbers = 0, []
    for part in parts:
        numbers.append(part.sequence - part.sequence.min(initial=0) + first)
        first = int(numbers[-1].max(initial=first - 1)) + 1
    return Paths(parts[0].layers, np.concatenate([part.chosen for part in parts]), np.concatenate(numbers))


def multi_hot(chosen: np.ndarray, experts: int) -> np.ndarray:
    """Return [..., E] float32 with 1 for each of the chosen experts [..., K], and 0 for the others."""
    hot = np.zeros((*chosen.shape[:-1], experts + 1), dtype=np.float32)  # the last column is for NO_EXPERT
    np.put_along_axis(hot, np.where(chosen == NO_EXPERT, experts, chosen), 1.0, axis=-1)
    return hot[..., :experts]
