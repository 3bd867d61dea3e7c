"""A stand-in gives a layer's output in the place of its experts: for measurements of what another answer costs.

It may run the layer's experts any number of times, with other indices and weights each time, on their own or their low
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeAlias

import torch

from smoe.runtime.execute import LayerExecutor
from smoe.runtime.step import Step
from smoe.runtime.substitution import EXACTLY


class LayerExperts(NamedTuple):
    """The experts of one layer in one step."""

    executor: LayerExecutor
    step: Step

    @property
    def no_expert(self) -> int:
        """The index E."""
        return self.executor.compute.store.layers[self.step.layer].experts

    def routed(self) -> torch.Tensor:
        """[T, H] of what the router has chosen."""
        return self.executor.run(self.step)

    def own(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[T, H] of the model's own copies; top_k_index [T, K], the index E for no expert."""
        return self.executor.run(self.step._replace(top_k_index=top_k_index, top_k_weights=top_k_weights))

    def low(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """The same of low copies; the engine must have some."""
        with self.executor.by_low_copies():
            return self.own(top_k_index, top_k_weights)


StandIn: TypeAlias = Callable[[LayerExperts], torch.Tensor]
"""Gives the experts' output [T, H] of one layer."""


class Answering(Protocol):
    """What has its layers answered by a stand-in: an engine."""

    answer: Callable[[Step], torch.Tensor]
    executor: LayerExecutor


@contextmanager
def answered_by(engine: Answering, stand_in: StandIn) -> Iterator[None]:
    """Inside, `stand_in` gives the output of every layer's experts, and nothing else is replaced or left out;
    observers receive that output."""
    executor = engine.executor
    before, substitution, answerer = engine.answer, executor.substitution, executor.answerer
    engine.answer, executor.answerer = (lambda step: stand_in(LayerExperts(executor, step))), None
    executor.substitute_by(EXACTLY)
    try:
        yield
    finally:
        engine.answer, executor.answerer = before, answerer
        executor.substitute_by(substitution)
