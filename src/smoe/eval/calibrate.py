"""Records the inputs of a model's experts on a text. Packing experts in fewer bits can take them into account."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.generation.teacher_forcing import read_through
from smoe.packing.calibration import Calibration
from smoe.runtime.engine import Engine
from smoe.runtime.observer import StepObserver
from smoe.runtime.step import Step

LEAST_TOKENS = 1000
"""The smallest number of tokens for a calibration. With fewer, most experts are used too rarely."""


def calibration_ids(tokenizer: Any, documents: Sequence[str], most: int) -> list[int]:
    """Return the token ids of the concatenated documents, at most the first `most`. Raise `ConfigError` if there are
    fewer than `LEAST_TOKENS`."""
    ids = list(tokenizer("\n\n".join(documents))["input_ids"])[:most]
    if len(ids) < LEAST_TOKENS:
        raise ConfigError(
            f"`calibration_text` has {len(ids)} tokens, but calibration needs some thousands: give a longer text, of "
            f"at least {LEAST_TOKENS} tokens",
            setting="calibration_text",
            given=len(ids),
            allowed=f"a text of {LEAST_TOKENS} tokens or more",
        )
    return ids


def listen(model: PreTrainedModel, ids: Sequence[int], calibration: Calibration, tick: Callable[[int], None]) -> None:
    """Run the model on `ids`, and add the experts' inputs to `calibration`. `tick` is called with the number of tokens
    of each pass."""
    engine: Engine = model.offload  # type: ignore[assignment]
    with engine.observed_by(_ExpertInputCollector(calibration)):
        read_through(model, ids, tick)


class _ExpertInputCollector(StepObserver):
    """An observer that adds the inputs of every layer's experts to a calibration."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration

    def computed(self, step: Step, output: torch.Tensor) -> None:
        self._calibration.add(step.layer, step.hidden, step.top_k_index)
