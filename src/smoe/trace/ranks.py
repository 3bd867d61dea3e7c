"""Statistics of ranks in a routing trace.

A rank is an expert's place among all experts of its layer by choice score, for one token; ranks 1 to k are the chosen.
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
"""The number of tokens within which an expert counts as used again."""


class Stretch(NamedTuple):
    """The routing of one sequence in one layer, token after token."""

    layer: int
    """The layer's number in the model."""
    shares: np.ndarray
    """[T, E] each expert's share of the scores, by expert; rows sum to 1."""
    order: np.ndarray
    """[T, E] the experts by rank."""
    active: np.ndarray
    """[T, E] whether an expert was chosen, by expert."""


def width(trace: Trace) -> tuple[int, int]:
    """Return (E, K) of all layers. Raises `ConfigError` where they differ, because ranks then have no common
    meaning."""
    found = {(layer.experts, layer.top_k) for layer in trace.header.layers}
    if len(found) != 1:
        raise ConfigError(f"layers of {trace.path} differ in their experts or choices: {sorted(found)}")
    return found.pop()


def stretches(trace: Trace, tokens: int | None = None) -> Iterator[Stretch]:
    """Yield all sequences in all layers, of the first `tokens` or of all, without padding.

    Raises `ConfigError` for a router with an unknown rule.
    """
    for layer in trace.header.layers:
        if layer.rule is None:
            raise ConfigError(f"the router of layer {layer.layer} of {trace.path} follows no known rule: no scores")
        rule, rows = ScoringRule.from_json(layer.rule), trace.of_layer(layer, tokens)
        for sequence in np.unique(rows["sequence"]):
            yield _stretch(rows[rows["sequence"] == sequence], layer, rule)


def _stretch(rows: np.ndarray, layer: TracedLayer, rule: ScoringRule) -> Stretch:
    """Return one sequence of a layer. Where rounding has made scores equal, the chosen experts come first, so that they
    have the ranks 1 to k."""
    scores = rule.scores(torch.from_numpy(rows["router_logits"][:, : layer.experts].copy()))
    choice = rule.choice(scores).numpy()
    active = np.zeros(choice.shape, dtype=bool)
    np.put_along_axis(active, rows["top_k_index"][:, : layer.top_k].astype(np.int64), True, axis=1)
    order = np.lexsort((-choice, ~active), axis=1)
    return Stretch(layer.layer, (scores / scores.sum(dim=-1, keepdim=True)).numpy(), order, active)


def shares_by_rank(parts: Iterable[Stretch]) -> np.ndarray:
    """Return [T, E] shares of all tokens in all layers; column 0 is rank 1."""
    return np.concatenate([np.take_along_axis(part.shares, part.order, axis=1) for part in parts])


def reuse_by_rank(parts: Iterable[Stretch], ahead: int = AHEAD) -> np.ndarray:
    """Return [E] how often the expert of a rank is chosen within the next `ahead` tokens; tokens with fewer do not
    count.

    Raises `ConfigError` where no sequence is long enough.
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
        raise ConfigError(f"no sequence has more than {ahead} tokens")
    return used / cases
