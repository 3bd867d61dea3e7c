"""A draft model on a machine of its own: the coordinator's request, and opening the files on that machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smoe.bounds import DEFAULT_DRAFT, DEPARTURE
from smoe.config import EngineConfig
from smoe.errors import BudgetError, ClusterError, ConfigError
from smoe.load.device import choose_device
from smoe.load.draft_model import check_draft, planned_draft
from smoe.machine.available_memory import free_device_bytes, less_margin
from smoe.machine.processor import set_compute_threads
from smoe.models.checkpoint import whole_checkpoint
from smoe.models.kv_cache import RowCache
from smoe.models.read_spec import read_spec
from smoe.models.spec import ModelSpec
from smoe.models.weight_samples import checksum
from smoe.policy.draft_predictions import Expected, TokenStep
from smoe.policy.registry import DRAFT
from smoe.presets import configure
from smoe.runtime.read_along import ReadAlong
from smoe.runtime.running_ahead import RunningAhead
from smoe.units import format_bytes

if TYPE_CHECKING:
    from smoe.cluster.following import Following

_WANTED = {"context_tokens", "dtype", "activations", "draft_precision", "draft_start", "draft_extra"}
"""The settings by which the coordinator requests a draft model, as it would configure its own."""


def placed_draft(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the draft model's place: in the cluster if it has a machine for it, else on the
    coordinator."""
    if config.prefetch != DRAFT or config.draft_on is not None:
        return config
    place = "coordinator"
    if config.cluster is not None:
        from smoe.cluster.identity import read_coordinator

        place = "cluster" if read_coordinator(config.cluster).drafts else "coordinator"
    return replace(config, draft_on=place)


def is_apart(config: EngineConfig) -> bool:
    """Return whether the draft model runs on another machine; the configuration must state its place."""
    return config.prefetch == DRAFT and config.draft_on == "cluster"


def following(spec: ModelSpec, config: EngineConfig) -> Following:
    """Return the coordinator's client of a draft model on another machine. Raises the errors of `check_draft`."""
    from smoe.cluster.following import Following

    check_draft(spec, config)
    experts = {site.layer: site.experts for site in spec.sites}
    chosen, spares = spec.anatomy.top_k, config.draft_extra or 0
    named = {layer: min(count, chosen[layer] + spares) for layer, count in experts.items()}
    wanted = {
        "context_tokens": spec.context_tokens,
        "dtype": str(spec.dtype),
        "activations": config.activations,
        "draft_precision": config.draft_precision or DEFAULT_DRAFT,
        "draft_start": config.draft_start or DEPARTURE[0],
        "draft_extra": spares,
    }
    return Following(wanted, experts, named, spec.context_tokens)


class DraftFiles:
    """A model's files on the draft model's machine."""

    def __init__(self, model: str | Path, threads: int | None = None) -> None:
        """Open the model's files. Raises `ModelError` if they are missing."""
        self._model = model
        self._threads = threads
        read_spec(model, configure())
        self._checkpoint = whole_checkpoint(model, None)
        self.weights = checksum(self._checkpoint.place)

    def open(self, wanted: Mapping[str, Any], on_prediction: Callable[[TokenStep, Expected], None]) -> ReadAlong:
        """Open the draft model with the coordinator's settings, completely in memory.

        Raises `ClusterError` for invalid settings, `ConfigError` if the model is not packed in the precision, and
        `BudgetError` if memory is insufficient.
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
                f"a draft model in {config.draft_precision} takes {format_bytes(nbytes)}, {format_bytes(room)} are "
                "free here; on the coordinator, give fewer bits (`draft_precision`) or a shorter text "
                "(`context_tokens`)"
            )
        set_compute_threads(self._threads)
        draft_routing = planned.open(None, torch.get_num_threads())
        pattern = RowCache(spec.config, 1, 1)
        draft_routing.follow(0, 0, pattern, lambda _: None)  # this gives its keys and values their shapes
        pattern.take_over(draft_routing.text.cache, 0, 1)
        ahead = RunningAhead(draft_routing, planned.departure, on_prediction)
        return ReadAlong(ahead, spec.config, pattern, planned.spec.context_tokens, nbytes)


def _config_of(wanted: Mapping[str, Any]) -> EngineConfig:
    if set(wanted) != _WANTED:
        raise ClusterError(
            f"the coordinator requests a draft model with settings that are unknown here: {str(sorted(wanted))[:200]}"
        )
    try:
        return configure(prefetch=DRAFT, **wanted)
    except (ConfigError, TypeError) as error:
        raise ClusterError(f"the draft model that the coordinator requests cannot be opened here: {error}") from error
