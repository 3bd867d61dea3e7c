"""Another answer than the router's: a stand-in says what a layer's experts give, for measurements of what that costs.

It may ask the layer's experts as often as it likes, each time by other indices and weights, and by their own or their
low copies; what is asked is computed exactly as asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeAlias

import torch

from smoe.runtime.execute import LayerExecutor
from smoe.runtime.observer import Routed
from smoe.runtime.rerouting import Scored
from smoe.runtime.substitution import EXACTLY


class LayerExperts(NamedTuple):
    """The experts of one layer in one step."""

    executor: LayerExecutor
    heard: Routed
    """The router's choice."""
    hidden: torch.Tensor
    """[T, H]"""
    scored: Scored | None
    """None where nobody listens to the router."""

    @property
    def no_expert(self) -> int:
        """The index E."""
        return self.executor.compute.store.layers[self.heard.layer].experts

    def own(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[T, H] of the model's own copies; top_k_index [T, K], the index E for no expert."""
        heard = self.heard
        return self.executor.run(
            heard.layer, heard.phase, self.hidden, top_k_index, top_k_weights, self.scored, heard.sequences
        )

    def low(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """The same of low copies; the engine must have some."""
        with self.executor.by_low_copies():
            return self.own(top_k_index, top_k_weights)


StandIn: TypeAlias = Callable[[LayerExperts], torch.Tensor]
"""Gives the experts' output [T, H] of one layer."""


def as_routed(experts: LayerExperts) -> torch.Tensor:
    """What the router has chosen."""
    return experts.own(experts.heard.top_k_index, experts.heard.top_k_weights)


class Asking(Protocol):
    """What asks a stand-in: an engine."""

    stand_in: StandIn
    executor: LayerExecutor


@contextmanager
def answered_by(engine: Asking, stand_in: StandIn) -> Iterator[None]:
    """Inside, `stand_in` says what the experts of every layer give, and nothing else is replaced or left out; observers
    hear that as their output."""
    executor = engine.executor
    before, substitution, answerer = engine.stand_in, executor.substitution, executor.answerer
    engine.stand_in, executor.answerer = stand_in, None
    executor.substitute_by(EXACTLY)
    try:
        yield
    finally:
        engine.stand_in, executor.answerer = before, answerer
        executor.substitute_by(substitution)
