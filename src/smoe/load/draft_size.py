"""Computes the memory of a draft model from the model's configuration alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from smoe.bounds import DEFAULT_DRAFT
from smoe.config import EngineConfig
from smoe.models.model_sizes import model_sizes
from smoe.models.spec import ModelSpec
from smoe.policy.budget import full_bytes
from smoe.policy.registry import DRAFT


def least_draft_bytes(model: str | Path, spec: ModelSpec, config: EngineConfig, revision: str | None = None) -> int:
    """Return the bytes that a draft model on the coordinator takes in addition to the model; 0 if the settings request
    none on the coordinator."""
    if config.prefetch != DRAFT or config.draft_on == "cluster":
        return 0
    own = draft_config(spec, config)
    _, its = model_sizes(model, own, revision)
    demand = its.demand(own, its.least_slot_bytes())
    return full_bytes(demand) - (0 if its.dense else demand.weights_bytes)


def draft_config(spec: ModelSpec, config: EngineConfig) -> EngineConfig:
    """Return the settings of the draft model's engine."""
    return replace(
        EngineConfig(precision=config.draft_precision or DEFAULT_DRAFT, prefetch="none", eviction="lru", preload=True),
        context_tokens=spec.context_tokens,
        prefill_tokens=1,
        io_threads=1,
        dtype=config.dtype,
        device=config.device,
        kernels=config.kernels,
        activations=config.activations,
        direct_io="off",
    )
