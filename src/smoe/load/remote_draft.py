"""Loads a draft model on a machine of its own, as the coordinator requests it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from smoe.config import EngineConfig
from smoe.errors import BudgetError, ClusterError, ConfigError
from smoe.load.device import choose_device
from smoe.load.draft_model import planned_draft
from smoe.load.open_draft import open_draft
from smoe.machine.available_memory import free_device_bytes, less_margin
from smoe.machine.processor import set_compute_threads
from smoe.models.checkpoint import whole_checkpoint
from smoe.models.kv_cache import RowCache
from smoe.models.read_spec import read_spec
from smoe.models.weight_samples import checksum
from smoe.policy.draft_predictions import Expected, TokenStep
from smoe.policy.registry import DRAFT
from smoe.presets import configure
from smoe.runtime.read_along import ReadAlong
from smoe.runtime.running_ahead import RunningAhead
from smoe.units import format_bytes

_WANTED = {"context_tokens", "dtype", "activations", "draft_precision", "draft_start", "draft_extra"}
"""The settings by which the coordinator requests a draft model. They are those of a draft model on the coordinator."""


class DraftFiles:
    """The model's files on the machine that runs the draft model."""

    def __init__(self, model: str | Path, threads: int | None = None) -> None:
        """Open the files of `model`. Raise `ModelError` if they are missing."""
        self._model = model
        self._threads = threads
        read_spec(model, configure())
        self._checkpoint = whole_checkpoint(model, None)
        self.weights = checksum(self._checkpoint.place)

    def open(self, wanted: Mapping[str, Any], on_prediction: Callable[[TokenStep, Expected], None]) -> ReadAlong:
        """Load the draft model, completely into memory, with the settings `wanted` of the coordinator. `on_prediction`
        receives its predictions.

        Raises `ClusterError` for invalid settings, `ConfigError` if the model is not packed in the requested precision,
        and `BudgetError` if the memory is not enough.
        """
        config = _config_of(wanted)
        spec, device = read_spec(self._model, config), choose_device(config)
        planned = planned_draft(self._checkpoint, spec, config, device)
        assert planned is not None
        # includes the coordinator's keys and values
        nbytes = planned.ledger.budget_bytes + planned.ledger.demand.kv_cache_bytes
        room = less_margin(free_device_bytes(device)[0])
        if nbytes > room:
            raise BudgetError(
                f"a draft model in {config.draft_precision} takes {format_bytes(nbytes)}, and {format_bytes(room)} "
                "are free on its machine; on the coordinator, give a precision with fewer bits (`draft_precision`) "
                "or a shorter context (`context_tokens`)"
            )
        set_compute_threads(self._threads)
        draft_routing = open_draft(planned, None, torch.get_num_threads())
        pattern = RowCache(spec.config, 1, 1)
        draft_routing.follow(0, 0, pattern, lambda _: None)  # this gives its keys and values their shapes
        pattern.take_over(draft_routing.text.cache, 0, 1)
        ahead = RunningAhead(draft_routing, planned.departure, on_prediction)
        return ReadAlong(ahead, spec.config, pattern, planned.spec.context_tokens, nbytes)


def _config_of(wanted: Mapping[str, Any]) -> EngineConfig:
    if set(wanted) != _WANTED:
        raise ClusterError(
            "the coordinator requests a draft model with settings that this version of smoe does not know: "
            f"{str(sorted(wanted))[:200]}"
        )
    try:
        return configure(prefetch=DRAFT, **wanted)
    except (ConfigError, TypeError) as error:
        raise ClusterError(
            f"the draft model that the coordinator requests cannot be opened on this machine: {error}"
        ) from error
