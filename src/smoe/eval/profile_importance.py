"""Profiles the importance of the choices of a text's tokens, from which importance thresholds are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.generation.teacher_forcing import read_through
from smoe.load.importance_profile import ImportanceProfile, profile_of
from smoe.policy.importance import scaled, unimportance
from smoe.routing import Routing
from smoe.runtime.engine import Engine
from smoe.runtime.observer import StepObserver
from smoe.runtime.step import Step

LEAST_TOKENS = 100
"""The least number of tokens: a layer has some hundred choices for a hundred tokens."""


def profile_reading(
    model: PreTrainedModel, ids: Sequence[int], text: str, tick: Callable[[int], None]
) -> ImportanceProfile:
    """Return the profile of a text that the model reads; `tick` receives the number of tokens read.

    The text is read in pieces as long as the context, because a router's output depends on the text only. Raises
    `ConfigError` for a short text.
    """
    check_enough(len(ids), "text")
    engine: Engine = model.offload  # type: ignore[assignment]
    listener = _ImportanceCollector()
    with engine.observed_by(listener):
        read_through(model, ids, tick)
    return profile_of(listener.values, len(ids), text)


def profile_recorded(routings: Iterable[Routing], text: str) -> ImportanceProfile:
    """Return the profile of a recorded run, including prompts; `routings` must have weights. Raises `ConfigError` for a
    short run."""
    values, tokens = list[float](), dict[int, int]()
    for routing in routings:
        assert routing.weights is not None
        for chosen, weights in zip(routing.top_k_index, routing.weights, strict=True):
            if chosen[0] != routing.experts:  # padding chooses no expert
                values += unimportance(weights)
                tokens[routing.layer] = tokens.get(routing.layer, 0) + 1
    count = max(tokens.values(), default=0)
    check_enough(count, "trace")
    return profile_of(values, count, text)


def check_enough(tokens: int, setting: str) -> None:
    """Raise `ConfigError` for a text, or a trace, that is too short."""
    if tokens < LEAST_TOKENS:
        raise ConfigError.too_few_tokens(setting, tokens, LEAST_TOKENS, "to measure the importance of choices")


class _ImportanceCollector(StepObserver):
    """Records the unimportance of every choice."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def routed(self, step: Step) -> None:
        for weights in scaled(step.top_k_weights.tolist()):
            self.values += unimportance(weights)
