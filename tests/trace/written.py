"""Traces written by hand, one token a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from smoe.trace.file import Trace, TraceWriter
from smoe.trace.record import TracedLayer, TraceHeader

RULE = {"score": "softmax", "weight": "share", "scale": 1.0, "bias": None, "groups": None}


class Token(NamedTuple):
    """A token of one sequence: for each layer the experts chosen, in the router's order."""

    chosen: Sequence[Sequence[int]]
    sequence: int = 0
    phase: int = 1
    heaviest: int = 0
    """Which of the chosen has the largest weight."""


def header_of(experts: int, top_k: int, layers: int = 2, rule: dict[str, object] | None = RULE) -> TraceHeader:
    """Layers with the numbers 1, 2, ..., for the first is often dense."""
    return TraceHeader("toy", "toy", 0.0, tuple(TracedLayer(n + 1, experts, top_k, rule) for n in range(layers)))


def write(path: Path, header: TraceHeader, tokens: Sequence[Token]) -> Trace:
    """Logits fall from choice to choice, those of the experts not chosen by their number."""
    with TraceWriter(path, header) as writer:
        for step, token in enumerate(tokens):
            for layer, chosen in zip(header.layers, token.chosen, strict=True):
                rows = header.blank_rows(layer, 1)
                rows["step"], rows["sequence"], rows["phase"] = step, token.sequence, token.phase
                logits = -1.0 - np.arange(layer.experts) / 8
                logits[list(chosen)] = 2.0 - np.arange(len(chosen)) / 8
                rows["router_logits"] = logits
                rows["top_k_index"] = chosen
                weights = np.arange(len(chosen), 0, -1) / sum(range(len(chosen) + 1))
                rows["top_k_weights"] = np.roll(weights, token.heaviest)
                writer.append(rows)
            writer.keep()
    return Trace(path)


def random_tokens(header: TraceHeader, count: int, seed: int = 3) -> list[Token]:
    """Of two sequences, some experts much more popular than others."""
    chance = np.random.default_rng(seed)
    found = []
    for n in range(count):
        chosen = []
        for layer in header.layers:
            shares = 1.0 / (1 + np.arange(layer.experts))
            picked = chance.choice(layer.experts, layer.top_k, replace=False, p=shares / shares.sum())
            chosen.append(picked.tolist())
        found.append(Token(chosen, sequence=2 * n // count))
    return found
