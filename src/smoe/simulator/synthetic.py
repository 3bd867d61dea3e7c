"""Synthetic traces: random routing with the statistics of a recorded run, for models that are not on this machine.

The routers' choices for a token are drawn from logits, one for every expert:

    logit = skew * z            z: the E quantiles of a normal distribution, shuffled in each layer: popularity
          + reuse               if the last token used the expert in this layer
          + affinity            if the layer before chose the expert that has this one as its partner
          + noise               Gumbel: by itself it would draw k of E experts in proportion to exp(the other terms)

The experts with the k highest logits are chosen. Scores are softmax(logit * sharpness).

The four parameters, called *habits*, are fitted to a recorded trace by the method of moments (`fit`): each is adjusted
until one statistic of the synthetic trace equals that of the recorded trace (`Moments`). They describe logits, so they
can be used for other numbers of layers and experts. Changes of topic, and differences between layers, are not modelled.
A result from a synthetic trace must be published only together with the sentence `SAYS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from smoe.errors import TraceError
from smoe.policy.importance import scaled
from smoe.routing import Phase, Routing, last_rows

SAYS = "the routing is synthetic: experts repeat as in recorded runs of the demo, not as in runs of this model"


@dataclass(frozen=True)
class Habits:
    """The four parameters that determine how repetitive a synthetic trace is."""

    skew: float
    reuse: float
    affinity: float
    sharpness: float


@dataclass(frozen=True)
class DrawnShape:
    """The sizes of a synthetic trace. All layers have the same number of experts."""

    experts: int
    """E, the number of experts of a layer."""
    top_k: int
    """K, the number of experts chosen for a token."""
    layers: int
    """L, the number of layers."""
    steps: int
    """The number of decode steps, with one token each."""
    prompt_tokens: int = 0
    """The number of tokens of a prefill before the decode steps; 0: no prefill."""


class Moments(NamedTuple):
    """Statistics of a trace's decode steps, averaged over layers."""

    concentration: float
    """The probability that an expert of one token is also used by a distant token: the sum of p(e)^2 / K, where p(e) is
    the fraction of tokens that use expert e."""
    reuse: float
    """The fraction of a token's experts that the last token used too."""
    lift: float
    """How many times more frequently an expert's partner is chosen after the expert than on average. The partner is the
    next layer's expert that follows most often in the first half of the trace; frequencies are from the second half."""
    gap: float | None
    """The mean of log(score of a chosen expert / score of rank K+1); None without scores."""


TYPICAL = Habits(skew=1.0, reuse=0.5, affinity=3.2, sharpness=0.5)
"""Parameters between those of the embedded model's four recorded texts (docs/evictions.md)."""
LEAST_REPETITIVE = Habits(skew=0.6, reuse=0.5, affinity=2.8, sharpness=0.55)
"""The parameters of the embedded model on stories that it wrote."""
MOST_REPETITIVE = Habits(skew=1.43, reuse=0.25, affinity=3.7, sharpness=0.44)
"""The parameters of the embedded model on code, on which it was not trained."""


def synthesise(
    shape: DrawnShape, habits: Habits = TYPICAL, seed: int = 0, *, with_scores: bool = False
) -> list[Routing]:
    """Return a synthetic trace of `shape`. Equal arguments give equal traces. O(tokens x layers x experts)."""
    chance = np.random.default_rng(seed)
    layers, experts = shape.layers, shape.experts
    quantiles = [NormalDist().inv_cdf((n + 0.5) / experts) for n in range(experts)]
    liked = habits.skew * np.stack([chance.permutation(quantiles) for _ in range(layers)])
    partners = np.stack([chance.permutation(experts) for _ in range(layers)])
    before, every_layer = np.zeros((layers, 0), dtype=np.int64), np.arange(layers)[:, None]
    prompt: list[list[tuple[list[int], np.ndarray | None]]] = [[] for _ in range(layers)]
    routings: list[Routing] = []
    for token in range(shape.prompt_tokens + shape.steps):
        logits = liked + chance.gumbel(size=(layers, experts))
        logits[every_layer, before] += habits.reuse
        chosen = _choose(logits, partners, habits.affinity, shape.top_k)
        scores = _scores(logits, habits.sharpness) if with_scores else None
        for layer, row in enumerate(chosen.tolist()):
            of_layer = None if scores is None else scores[layer]
            if token < shape.prompt_tokens:
                prompt[layer].append((row, of_layer))
            else:
                routings.append(_routing(layer, Phase.DECODE, experts, [(row, of_layer)]))
        if token == shape.prompt_tokens - 1:
            routings = [_routing(layer, Phase.PREFILL, experts, rows) for layer, rows in enumerate(prompt)]
        before = chosen
    return routings


def _choose(logits: np.ndarray, partners: np.ndarray, affinity: float, top_k: int) -> np.ndarray:
    """Return [L, K], the experts with the highest `logits` [L, E], highest first, layer by layer. The logits of the
    partners of the last layer's choice are raised in place by `affinity`."""
    chosen = np.empty((len(logits), top_k), dtype=np.int64)
    for layer, row in enumerate(logits):
        if layer:
            row[partners[layer][chosen[layer - 1]]] += affinity
        highest = row.argpartition(-top_k)[-top_k:]
        chosen[layer] = highest[row[highest].argsort()[::-1]]
    return chosen


def _scores(logits: np.ndarray, sharpness: float) -> np.ndarray:
    """Return [L, E], the softmax of each row of logits times `sharpness`."""
    powers = np.exp(sharpness * (logits - logits.max(axis=1, keepdims=True)))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _routing(layer: int, phase: Phase, experts: int, rows: Sequence[tuple[list[int], np.ndarray | None]]) -> Routing:
    """Return the routing of one layer in one step. As in the engine, a prompt has scores for its last tokens only."""
    routing = Routing(layer, phase, experts, [row for row, _ in rows])
    scored = [(row, of_row) for row, of_row in rows if of_row is not None]
    if not scored:
        return routing
    assert len(scored) == len(rows), "all tokens of a step have scores, or none"
    weights = scaled([of_row[row].tolist() for row, of_row in scored])
    with_scores = range(len(rows)) if phase is Phase.DECODE else last_rows(routing)
    return routing._replace(scores=[scored[row][1].tolist() for row in with_scores], weights=weights)


def moments(trace: Sequence[Routing], steps: int) -> Moments:
    """Return the statistics of the first `steps` decode steps of `trace` (of each step's first sequence). All layers
    must have the same number of experts."""
    chosen, gaps = _decoded(trace, steps)
    tokens, layers, top_k = chosen.shape
    experts = 1 + int(chosen.max())
    uses = np.zeros((tokens, layers, experts), dtype=bool)
    np.put_along_axis(uses, chosen, True, axis=2)
    share = uses.mean(axis=0)
    reused = (uses[1:] & uses[:-1]).sum() / (top_k * layers * max(1, tokens - 1))
    return Moments(float((share**2).sum() / (top_k * layers)), float(reused), _lift(uses), gaps)


def _decoded(trace: Sequence[Routing], steps: int) -> tuple[np.ndarray, float | None]:
    """Return the chosen experts [steps, L, K] of a trace's decode steps, and the mean gap between the scores of chosen
    experts and that of rank K+1 (`Moments.gap`)."""
    rows: dict[int, list[list[int]]] = {}
    gaps: list[float] = []
    for routing in trace:
        of_layer = rows.setdefault(routing.layer, [])
        if routing.phase is not Phase.DECODE or len(of_layer) >= steps:
            continue
        row = list(routing.top_k_index[0])
        of_layer.append(row)
        if routing.scores is not None:
            ranked = sorted(routing.scores[0], reverse=True)
            gaps += [log(ranked[n] / ranked[len(row)]) for n in range(len(row)) if ranked[len(row)] > 0]
    least = min(map(len, rows.values()), default=0)
    if least < 2:
        raise TraceError(
            f"a trace of {least} decode steps is too short to learn how routing repeats from step to step; record "
            "some hundred tokens"
        )
    chosen = np.array([of_layer[:least] for _, of_layer in sorted(rows.items())]).swapaxes(0, 1)
    return chosen, sum(gaps) / len(gaps) if gaps else None


def _lift(uses: np.ndarray) -> float:
    """Return how many times more frequently an expert's partner is chosen after the expert than on average
    (`Moments.lift`). `uses`: [T, L, E], whether each token uses each expert."""
    half = len(uses) // 2
    first, second = uses[:half].astype(float), uses[half:].astype(float)
    behind = elsewhere = 0.0
    for layer in range(1, uses.shape[1]):
        together = first[:, layer - 1].T @ first[:, layer]
        partner = together.argmax(axis=1)
        given = second[:, layer - 1].sum(axis=0)
        behind += float((second[:, layer - 1] * second[:, layer][:, partner]).sum())
        elsewhere += float((given * second[:, layer].mean(axis=0)[partner]).sum())
    return behind / elsewhere if elsewhere else 1.0


def fit(trace: Sequence[Routing], steps: int = 400, seed: int = 0) -> Habits:
    """Return the parameters with which a synthetic trace has the statistics of this trace. If the trace has no scores,
    `sharpness` is the usual one. It takes some seconds.

    Each parameter in turn is found by bisection, in several rounds. The random numbers are always the same, so that
    every statistic grows with its parameter. Raise `TraceError` if the trace is too short, or if its layers differ.
    """
    layers = sorted({routing.layer for routing in trace})
    wanted = moments(trace, steps)
    first = next(routing for routing in trace if routing.phase is Phase.DECODE)
    count = min(steps, sum(r.phase is Phase.DECODE and r.layer == layers[0] for r in trace))
    shape = DrawnShape(first.experts, len(first.top_k_index[0]), len(layers), count)
    found = Habits(1.0, 0.5, 0.5, 1.0)

    def halve_in(name: str, most: float, statistic: str) -> None:
        nonlocal found
        low, high = 0.0, most
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            drawn = moments(synthesise(shape, replace(found, **{name: middle}), seed), count)
            low, high = (middle, high) if getattr(drawn, statistic) < getattr(wanted, statistic) else (low, middle)
        found = replace(found, **{name: (low + high) / 2})

    for _ in range(_ROUNDS):
        halve_in("skew", 4.0, "concentration")
        halve_in("reuse", 4.0, "reuse")
        halve_in("affinity", 4.0, "lift")
    if wanted.gap is None:
        return replace(found, sharpness=TYPICAL.sharpness)
    drawn = moments(synthesise(shape, found, seed, with_scores=True), count)
    assert drawn.gap is not None, "asked for"
    return replace(found, sharpness=wanted.gap / drawn.gap)


_HALVINGS = 8
"""The number of bisections, which give a resolution of 1/64 of a logit."""
_ROUNDS = 3
