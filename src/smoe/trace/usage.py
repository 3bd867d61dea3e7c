"""Statistics of the use of experts in a recorded run: how evenly they are used, how soon again, in which sequences, and
after which experts of the layer before.

Letters: L layers, E experts, K experts chosen for a token, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from smoe.errors import ConfigError
from smoe.prediction.activation_path import Paths, RoutedLayer, multi_hot
from smoe.prediction.affinity import affinity_of
from smoe.prediction.popularity import popularity_of
from smoe.trace.file import Trace
from smoe.trace.ranks import Stretch

LEAST_TOKENS = 16
"""The smallest number of tokens for statistics of the next layer's experts."""
PARTS = 16
"""A trace of one sequence is divided into this many parts, which are compared with one another."""
_LEAST_PART = 16
"""The smallest number of tokens in a part."""


@dataclass(frozen=True)
class Entropy:
    """How evenly experts are used, in bits: log2 E if all are used equally often. Each array has the shape [L]."""

    used: np.ndarray
    """The entropy of the experts' fractions of their layer's choices."""
    of_a_token: np.ndarray | None
    """The entropy of the router's scores for a token, averaged over tokens; None if scores are unknown."""
    most: np.ndarray
    """log2 E, the largest possible entropy."""


@dataclass(frozen=True)
class NextToken:
    """How many of a token's experts the next token uses again (HOBBIT, figure 10a). Each array has the shape [L]."""

    heaviest: np.ndarray
    """The fraction of tokens whose expert of largest weight the next token uses again."""
    share: np.ndarray
    """The fraction of a token's experts that the next token uses again."""
    some: np.ndarray
    """The fraction of tokens of which the next token uses at least one expert again."""
    chance: np.ndarray
    """The value of `heaviest` and `share` if experts were chosen at random: K / E."""
    chance_of_some: np.ndarray


@dataclass(frozen=True)
class BySequence:
    """How often each sequence used each expert (HOBBIT, figure 10b)."""

    has_parts: bool
    """Whether the trace has only one sequence, whose parts are compared instead."""
    tokens: np.ndarray
    """[S] the number of tokens of each sequence."""
    times_even: np.ndarray
    """[S, L, E]: the fraction of a sequence's choices that an expert has, in multiples of 1 / E."""


@dataclass(frozen=True)
class Affinities:
    """Compares two predictions of the next layer's experts: by the experts of this layer (affinity), and by popularity
    (DuoServe, figure 2). Both are fitted on the first half of the tokens and measured on the second."""

    by_affinity: np.ndarray
    """[L-1]: the fraction of a layer's choices that affinity predicts."""
    by_popularity: np.ndarray
    """[L-1]: the fraction of a layer's choices that popularity predicts."""
    strongest: int
    """The index in `by_affinity` of the layer for which affinity gains most over popularity."""
    follows: np.ndarray
    """[E, E] for the layer of which `strongest` has the index, after the layer before it. Each row belongs to an expert
    of the layer before. It has the fractions of the layer's choices, for tokens that use this expert."""

    @property
    def gain(self) -> float:
        """How much more affinity predicts than popularity, averaged over the layers."""
        return float(np.mean(self.by_affinity - self.by_popularity))


def times_even(paths: Paths) -> np.ndarray:
    """Return [L, E]: the fraction of its layer's choices that an expert has, in multiples of 1 / E; NaN beyond a
    layer's own experts."""
    return _in_multiples(popularity_of(paths), paths.layers)


def _in_multiples(shares: np.ndarray, layers: Sequence[RoutedLayer]) -> np.ndarray:
    """Return fractions [..., L, E] as multiples of 1 / E, where E is the layer's own number of experts; NaN beyond
    it."""
    experts = np.array([layer.experts for layer in layers])[:, None]
    found: np.ndarray = np.where(np.arange(shares.shape[-1]) < experts, shares * experts, np.nan)
    return found


def bits(shares: np.ndarray) -> np.ndarray:
    """Return the entropy in bits of fractions [..., E] that sum to 1."""
    found: np.ndarray = -(shares * np.log2(np.where(shares > 0, shares, 1.0))).sum(axis=-1)
    return found


def entropy(paths: Paths, parts: Iterable[Stretch] | None) -> Entropy:
    """Return how evenly the tokens of `paths` use experts, as entropies. `parts`: the same tokens with their scores;
    None if the scores are unknown."""
    used = bits(popularity_of(paths).astype(np.float64))
    most = np.log2([layer.experts for layer in paths.layers])
    if parts is None:
        return Entropy(used, None, most)
    place = {layer.layer: n for n, layer in enumerate(paths.layers)}
    sums, counts = np.zeros(len(most)), np.zeros(len(most))
    for part in parts:
        sums[place[part.layer]] += bits(part.shares.astype(np.float64)).sum()
        counts[place[part.layer]] += len(part.shares)
    return Entropy(used, sums / np.maximum(counts, 1), most)


def next_token(traces: Sequence[Trace], tokens: int | None = None) -> NextToken:
    """Return the statistics of consecutive tokens. `tokens`: how many tokens of every trace are analysed, from the
    start; None: all. Raise `ConfigError` if no sequence has two tokens."""
    layers = traces[0].header.layers
    sums, pairs = np.zeros((3, len(layers))), np.zeros(len(layers))
    for trace in traces:
        for n, layer in enumerate(layers):
            rows = trace.of_layer(layer, tokens)
            rows = rows[np.argsort(rows["sequence"], kind="stable")]
            chosen = rows["top_k_index"][:, : layer.top_k].astype(np.int64)
            follows = rows["sequence"][1:] == rows["sequence"][:-1]
            again = np.take_along_axis(multi_hot(chosen[1:], layer.experts), chosen[:-1], axis=1)[follows] > 0
            heaviest = rows["top_k_weights"][:-1, : layer.top_k].argmax(axis=1)[follows]
            first = np.take_along_axis(again, heaviest[:, None], axis=1)
            sums[:, n] += first.sum(), again.mean(axis=1).sum(), again.any(axis=1).sum()
            pairs[n] += len(again)
    if not pairs.all():
        raise ConfigError("no sequence of the traces has more than one token; record longer sequences")
    chance = np.array([layer.top_k / layer.experts for layer in layers])
    none = [comb(layer.experts - layer.top_k, layer.top_k) / comb(layer.experts, layer.top_k) for layer in layers]
    heaviest, share, some = sums / pairs
    return NextToken(heaviest, share, some, chance, 1 - np.array(none))


def by_sequence(paths: Paths) -> BySequence:
    """Return the statistics of all sequences in their order. A single sequence is divided into `PARTS` parts. Raise
    `ConfigError` if it is too short for two parts."""
    found = list(paths.of_sequences())
    has_parts = len(found) == 1
    if has_parts:
        count = min(PARTS, len(found[0]) // _LEAST_PART)
        if count < 2:
            raise ConfigError(
                f"one sequence of {len(found[0])} tokens is too short to be split into parts and compared; record a "
                "longer sequence, or several"
            )
        found = np.array_split(found[0], count)
    widest = max(layer.experts for layer in paths.layers)
    counts = np.stack([multi_hot(chosen, widest).sum(axis=0) for chosen in found])  # [S, L, E]
    shares = counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1)
    return BySequence(has_parts, np.array([len(chosen) for chosen in found]), _in_multiples(shares, paths.layers))


def affinities(paths: Paths) -> Affinities:
    """Return the comparison of affinity and popularity. Raise `ConfigError` if only one layer has experts, or for fewer
    than `LEAST_TOKENS` tokens."""
    if len(paths.layers) < 2:
        raise ConfigError("only one layer has experts, so there is no next layer whose experts could be predicted")
    if len(paths.chosen) < LEAST_TOKENS:
        raise ConfigError(
            f"{len(paths.chosen)} tokens are too few to find out which experts are used after which; record at least "
            f"{LEAST_TOKENS}"
        )
    learned, judged = paths.split(0.5)
    affinity, popularity = affinity_of(learned), popularity_of(learned)
    rates = np.zeros((2, len(affinity)))
    for n, follows in enumerate(affinity):
        layer, before = paths.layers[n + 1], multi_hot(judged.chosen[:, n], follows.shape[0])
        wanted = multi_hot(judged.chosen[:, n + 1], follows.shape[0])[:, : layer.experts] > 0
        likely = (before @ follows, np.broadcast_to(popularity[n + 1], wanted.shape[:1] + popularity[n + 1].shape))
        rates[:, n] = [_named(scores[:, : layer.experts], wanted, layer.top_k) for scores in likely]
    strongest = int(np.argmax(rates[0] - rates[1]))
    of_all = affinity_of(paths._replace(layers=paths.layers[strongest : strongest + 2], chosen=_two(paths, strongest)))
    shape = (paths.layers[strongest].experts, paths.layers[strongest + 1].experts)
    return Affinities(rates[0], rates[1], strongest, of_all[0, : shape[0], : shape[1]])


def _two(paths: Paths, place: int) -> np.ndarray:
    """Return [N, 2, K], the experts chosen by the layer at index `place` and by the next layer."""
    found: np.ndarray = paths.chosen[:, place : place + 2]
    return found


def _named(scores: np.ndarray, wanted: np.ndarray, top_k: int) -> float:
    """Return how many of the wanted experts [N, E] are among the K highest `scores` [N, E], as a fraction. Of equal
    scores, the lower expert number counts as higher."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return float(np.take_along_axis(wanted, best, axis=1).sum() / wanted.sum())
