"""Converts a trace to the paths of its tokens, on which predictors are fitted (`smoe.prediction.activation_path`)."""

from __future__ import annotations

import numpy as np

from smoe.prediction.activation_path import NO_EXPERT, Paths, RoutedLayer
from smoe.trace.file import Trace
from smoe.trace.record import TraceHeader


def routed_layers(header: TraceHeader) -> tuple[RoutedLayer, ...]:
    """Return the sizes of the routing in each layer of a trace."""
    return tuple(RoutedLayer(each.layer, each.experts, each.top_k) for each in header.layers)


def paths_in(trace: Trace, tokens: int | None = None) -> Paths:
    """Return the paths (the chosen experts, layer by layer) of a trace's tokens, including those of prompts, without
    padding. `tokens`: only this many tokens from the start; None: all."""
    layers = routed_layers(trace.header)
    layer_of = np.asarray(trace.rows["layer"])
    places = [np.flatnonzero(layer_of == each.layer) for each in layers]
    index, first = trace.rows["top_k_index"], places[0]
    real = np.flatnonzero(index[first].min(axis=1) < layers[0].experts)[:tokens]
    chosen = np.full((len(real), len(layers), max(each.top_k for each in layers)), NO_EXPERT, dtype=np.int64)
    for place, each in enumerate(layers):
        chosen[:, place, : each.top_k] = index[places[place][real], : each.top_k]
    return Paths(layers, chosen, trace.rows["sequence"][first[real]].astype(np.int64))
