"""A model whose routing and text are those of a synthetic trace, whatever its other weights are.

Each step n of the trace has a code, a random vector. It is the embedding of every token whose id is n modulo the number
of steps, and it stays the largest part of the hidden state in all layers, as layers add less. So

    embedding [V, H]            row of token t          = code of step t mod steps
    router of a layer [E, H]    router . (norm * code)  = the logits of the code's step in that layer
    output [V, H]               row of token first + n  = size * code of step n - 1; all other rows are small

Each token of a prompt thus routes as one step of the trace does, and the text after it follows the trace step by step:
the same text, with the same experts, in every engine, greedily or sampled. What the layers add is noise to the routers.
The weights of the norms before them differ from layer to layer, as in trained models: a router that is applied to the
input of the layer before is right about as often as in recorded runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.whole_size.geometry import Geometry
from smoe.formats.base import Floats
from smoe.routing import Routing
from smoe.simulator.synthetic import DrawnShape, synthesise

NORM_SPREAD = 0.4
"""The standard deviation of the logarithms of a norm's weights: the next layer's router, applied to this layer's input,
then names 78 % of the experts, as in recorded runs."""
OUTPUT_MARGIN = 40.0
"""The logit of the next token, where those of all others are about 0."""


def steps_of(g: Geometry) -> int:
    """Return the number of steps until the text repeats; it is low, so that all codes are nearly orthogonal."""
    return min(512, g.hidden // 4)


def first_token(g: Geometry) -> int:
    """Return the text's token for the trace's first step. Its id is low, so every vocabulary has a word for it."""
    return 2 * steps_of(g)


@dataclass(frozen=True)
class TracedRouting:
    """The weights that make a file's model follow a trace."""

    codes: Floats
    """[steps, H]"""
    norms: dict[int, Floats]
    """The weights [H] of the norm before the router, by layer."""
    routers: dict[int, Floats]
    """The routers [E, H] by layer."""

    @property
    def next_token_rows(self) -> Floats:
        """The rows [steps, H] of the output matrix, beginning with that of the first token."""
        rows: Floats = OUTPUT_MARGIN / self.codes.shape[1] * np.roll(self.codes, 1, axis=0)
        return rows


def routing_of(g: Geometry, codes: Floats, seed: int) -> TracedRouting:
    """Return routers that give these codes the logits of a trace with typical habits."""
    shape = DrawnShape(g.experts, g.top_k, len(g.sparse_layers), len(codes))
    logits = _logits(synthesise(shape, seed=seed, with_scores=True), shape)
    norms, routers = {}, {}
    for layer, of_layer in zip(g.sparse_layers, logits, strict=True):
        norms[layer] = _norm_weights(codes.shape[1], np.random.default_rng([seed, layer]))
        inputs = codes * norms[layer]  # [steps, H], fewer rows than columns: the smallest matrix that fits all of them
        routers[layer] = np.linalg.solve(inputs @ inputs.T, of_layer).T.astype(np.float32) @ inputs
    return TracedRouting(codes, norms, routers)


def _norm_weights(hidden: int, chance: np.random.Generator) -> Floats:
    """Return the weights [hidden] of a norm, with the mean square 1."""
    weights = np.exp(chance.normal(0, NORM_SPREAD, hidden))
    scaled: Floats = (weights / np.sqrt(np.mean(weights**2))).astype(np.float32)
    return scaled


def _logits(trace: Sequence[Routing], shape: DrawnShape) -> Floats:
    """Return the logarithms [L, steps, E] of the scores, with the mean 0 in every row."""
    scores = np.array([routing.scores for routing in trace]).reshape(shape.steps, shape.layers, shape.experts)
    logits = np.log(scores).swapaxes(0, 1)
    centred: Floats = logits - logits.mean(axis=2, keepdims=True)
    return centred
