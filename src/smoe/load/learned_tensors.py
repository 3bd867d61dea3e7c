"""Reads a model's learned values: fitted predictors, corrections of routers, and estimates of the next use."""

from __future__ import annotations

from pathlib import Path

from smoe.bounds import DEFAULT_PREFETCH_DEPTH
from smoe.config import EngineConfig
from smoe.load.fitted_predictor import fitted_of
from smoe.load.gate_corrections import corrections_of
from smoe.load.learned import LearnedValues
from smoe.load.next_use import next_use_of
from smoe.models.spec import ModelSpec
from smoe.policy.registry import CORRECTED_GATES, eviction_kind, predictor_kind


def read_learned(config: EngineConfig, place: Path, spec: ModelSpec) -> tuple[LearnedValues, dict[str, str]]:
    """Return the learned values that the settings need, and for each a text that says where it comes from, by
    setting."""
    reasons: dict[str, str] = {}
    fitted = corrections = next_use = None
    if predictor_kind(config.prefetch).is_fitted:
        fitted = fitted_of(place, config.prefetch)
    if config.prefetch == CORRECTED_GATES:
        found = corrections_of(place, spec, config.prefetch_depth or DEFAULT_PREFETCH_DEPTH)
        corrections, reasons["prefetch"] = found.corrections, str(found)
    if eviction_kind(config.eviction).is_trained:
        next_use, reasons["eviction"] = next_use_of(place, {site.layer: site.experts for site in spec.sites})
    return LearnedValues(fitted, corrections, next_use), reasons
