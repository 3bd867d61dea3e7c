"""Replaces the experts of a layer by a function (a stand-in), to measure the quality cost of resolving misses in
another way.

A stand-in may compute the layer's experts any number of times, with different indices and weights, from full or low
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch

from smoe.expert import EXACT
from smoe.runtime.engine import Engine
from smoe.runtime.execute import LayerExecutor
from smoe.runtime.step import Step


class LayerExperts(NamedTuple):
    """The experts of one layer in one step, with methods by which a stand-in (a function that replaces the layer's
    experts) computes them."""

    executor: LayerExecutor
    step: Step

    @property
    def no_expert(self) -> int:
        """The index E that means "no expert", where E is the number of experts in the layer."""
        return self.executor.arrivals.stores[EXACT].layers[self.step.layer].experts

    def routed(self) -> torch.Tensor:
        """Return the output [T, H] of the experts that the router chose."""
        return self.executor.run(self.step)

    def own(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return the output [T, H] of the full copies of the experts `top_k_index` [T, K] with the weights
        `top_k_weights` [T, K]; the index E means "no expert"."""
        return self.executor.run(self.step._replace(top_k_index=top_k_index, top_k_weights=top_k_weights))

    def low(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return the output [T, H] of the low-precision copies of the experts `top_k_index` [T, K] with the weights
        `top_k_weights` [T, K]; the index E means "no expert". The engine must have low-precision copies."""
        with self.executor.by_low_copies():
            return self.own(top_k_index, top_k_weights)


StandIn: TypeAlias = Callable[[LayerExperts], torch.Tensor]
"""A function that takes one layer's experts and returns their output [T, H]."""


@contextmanager
def answered_by(engine: Engine, stand_in: StandIn) -> Iterator[None]:
    """Let `stand_in` compute the output of every layer's experts during the `with` block, without substitution or
    dropping. Observers receive that output."""
    executor = engine.executor
    with executor.exactly(), engine.passes.answered_by(lambda step: stand_in(LayerExperts(executor, step))):
        yield
