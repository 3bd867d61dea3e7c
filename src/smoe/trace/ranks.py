"""Statistics of ranks in a routing trace.

For one token, the rank of an expert is its position among all experts of its layer, ordered by choice score. The
experts with ranks 1 to K are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from smoe.errors import ConfigError
from smoe.models.scoring import ScoringRule
from smoe.trace.file import Trace
from smoe.trace.record import TracedLayer

AHEAD = 3
"""An expert counts as used again if it is chosen within this number of tokens."""


class Stretch(NamedTuple):
    """The routing of all tokens of one sequence in one layer, with ranks and scores."""

    layer: int
    """The layer's number in the model."""
    shares: np.ndarray
    """[T, E] by expert: the fraction of the token's scores that the expert has; each row sums to 1."""
    order: np.ndarray
    """[T, E] the experts in the order of their ranks."""
    active: np.ndarray
    """[T, E] by expert: whether the expert was chosen."""


def width(trace: Trace) -> tuple[int, int]:
    """Return (E, K), which must be equal in all layers. Raise `ConfigError` if layers differ, because ranks then have
    no common meaning."""
    found = {(layer.experts, layer.top_k) for layer in trace.header.layers}
    if len(found) != 1:
        raise ConfigError(
            f"the layers of {trace.path} differ in their number of experts or of experts per token, so ranks cannot "
            f"be compared: {sorted(found)}"
        )
    return found.pop()


def stretches(trace: Trace, tokens: int | None = None) -> Iterator[Stretch]:
    """Yield the routing of every sequence in every layer, without padding. `tokens`: only this many from the start;
    None: all.

    Raise `ConfigError` if the rule of a router is unknown.
    """
    for layer in trace.header.layers:
        if layer.rule is None:
            raise ConfigError(
                f"the router of layer {layer.layer} of {trace.path} follows no rule that smoe knows, so its scores "
                "cannot be computed"
            )
        rule, rows = ScoringRule.from_json(layer.rule), trace.of_layer(layer, tokens)
        for sequence in np.unique(rows["sequence"]):
            yield _stretch(rows[rows["sequence"] == sequence], layer, rule)


def _stretch(rows: np.ndarray, layer: TracedLayer, rule: ScoringRule) -> Stretch:
    """Return the routing of one sequence in one layer. If rounding has made scores equal, the chosen experts come
    first, so that they have the ranks 1 to K."""
    scores = rule.scores(torch.from_numpy(rows["router_logits"][:, : layer.experts].copy()))
    choice = rule.choice(scores).numpy()
    active = np.zeros(choice.shape, dtype=bool)
    np.put_along_axis(active, rows["top_k_index"][:, : layer.top_k].astype(np.int64), True, axis=1)
    order = np.lexsort((-choice, ~active), axis=1)
    return Stretch(layer.layer, (scores / scores.sum(dim=-1, keepdim=True)).numpy(), order, active)


def shares_by_rank(parts: Iterable[Stretch]) -> np.ndarray:
    """Return [T, E], for all tokens in all layers: for each rank, the fraction of the token's scores that the expert of
    this rank has. Column 0 is rank 1."""
    return np.concatenate([np.take_along_axis(part.shares, part.order, axis=1) for part in parts])


def reuse_by_rank(parts: Iterable[Stretch], ahead: int = AHEAD) -> np.ndarray:
    """Return [E]: how often the expert of each rank is chosen again within the next `ahead` tokens. Tokens with fewer
    tokens after them are not counted.

    Raise `ConfigError` if no sequence is long enough.
    """
    used, cases = np.zeros(0), 0
    for part in parts:
        count = len(part.order) - ahead
        if count > 0:
            soon = np.any([part.active[after : after + count] for after in range(1, ahead + 1)], axis=0)
            found = np.take_along_axis(soon, part.order[:count], axis=1).sum(axis=0)
            used = found + used if cases else found.astype(float)
            cases += count
    if not cases:
        raise ConfigError(f"no sequence of the traces has more than {ahead} tokens; record longer sequences")
    return used / cases
