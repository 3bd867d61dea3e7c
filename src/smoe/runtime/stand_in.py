"""Replaces the experts of a layer by a function (a stand-in), to measure the quality cost of another resolution.

A stand-in may run the layer's experts any number of times, with different indices and weights, on full or low copies.
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
    """The experts of one layer in one step."""

    executor: LayerExecutor
    step: Step

    @property
    def no_expert(self) -> int:
        """The index E, "no expert"."""
        return self.executor.arrivals.stores[EXACT].layers[self.step.layer].experts

    def routed(self) -> torch.Tensor:
        """Return [T, H], the output for the router's choice."""
        return self.executor.run(self.step)

    def own(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return [T, H], the output of full copies; top_k_index [T, K] with the index E for no expert."""
        return self.executor.run(self.step._replace(top_k_index=top_k_index, top_k_weights=top_k_weights))

    def low(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return [T, H], the output of low copies, which the engine must have."""
        with self.executor.by_low_copies():
            return self.own(top_k_index, top_k_weights)


StandIn: TypeAlias = Callable[[LayerExperts], torch.Tensor]
"""A function that returns the experts' output [T, H] of one layer."""


@contextmanager
def answered_by(engine: Engine, stand_in: StandIn) -> Iterator[None]:
    """Let `stand_in` compute the output of every layer's experts for the duration of the `with` block, without
    substitution or dropping; observers receive that output."""
    executor = engine.executor
    with executor.exactly(), engine.passes.answered_by(lambda step: stand_in(LayerExperts(executor, step))):
        yield
