"""Measures the distribution of importance over the experts that tokens choose. Importance thresholds are computed from
it."""

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
"""The smallest number of tokens: a layer then has several hundred choices."""


def profile_reading(
    model: PreTrainedModel, ids: Sequence[int], text: str, tick: Callable[[int], None]
) -> ImportanceProfile:
    """Return the importance profile of a text through which the model is run. `tick` is called with the number of
    tokens of each pass.

    The text is processed in pieces as long as the context, because a router's output depends on the text only. Raise
    `ConfigError` if the text is too short.
    """
    check_enough(len(ids), "text")
    engine: Engine = model.offload  # type: ignore[assignment]
    listener = _ImportanceCollector()
    with engine.observed_by(listener):
        read_through(model, ids, tick)
    return profile_of(listener.values, len(ids), text)


def profile_recorded(routings: Iterable[Routing], text: str) -> ImportanceProfile:
    """Return the importance profile of a recorded run, including prompts. `routings` must have weights. Raise
    `ConfigError` if the run is too short."""
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
    """Raise `ConfigError` if a text or trace, given as `setting`, has too few tokens."""
    if tokens < LEAST_TOKENS:
        raise ConfigError.too_few_tokens(setting, tokens, LEAST_TOKENS, "to measure the importance of choices")


class _ImportanceCollector(StepObserver):
    """An observer that stores how unimportant each chosen expert is for its token."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def routed(self, step: Step) -> None:
        for weights in scaled(step.top_k_weights.tolist()):
            self.values += unimportance(weights)
