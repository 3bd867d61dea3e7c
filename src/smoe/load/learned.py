"""What was learned of a model and kept, as a configuration asks for it; it takes its place in the budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from smoe.bounds import CORRECTED_GATES, DEFAULT_PREFETCH_DEPTH
from smoe.config import EngineConfig
from smoe.load.fitted_predictor import fitted_of
from smoe.load.gate_corrections import corrections_of
from smoe.load.next_use import next_use_of
from smoe.models.spec import ModelSpec
from smoe.policy.eviction.learned import NextUse
from smoe.policy.registry import EXPERT_MLP, FITTED_PREFETCH, LEARNED
from smoe.prediction import expert_mlp
from smoe.prediction.correction import Correction
from smoe.prediction.fitted import Fitted
from smoe.prediction.registry import routed_layers


class Learned(NamedTuple):
    """Each None where nothing asks for it."""

    fitted: Fitted | None = None
    """The predictor of decode that was fitted on traces."""
    corrections: Mapping[tuple[int, int], Correction] | None = None
    """Of the routers, where they predict."""
    next_use: NextUse | None = None
    """Of the experts, where it is what residents are ranked by."""

    @property
    def nbytes(self) -> int:
        """Of memory, beside the corrections: the predictor's own copy of them is counted with the predictor."""
        return sum(each.nbytes for each in (self.fitted, self.next_use) if each is not None)


def expected_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Of memory, of a predictor that the settings ask for and that has not been fitted yet; 0 for those that are counts
    alone."""
    return expert_mlp.nbytes_of(routed_layers(spec)) if config.prefetch == EXPERT_MLP else 0


def learned_of(config: EngineConfig, place: Path, spec: ModelSpec) -> tuple[Learned, dict[str, str]]:
    """(what the model in `place` needs, where it comes from by setting).

    Raises `ConfigError` where something is asked for that has not been learned of these weights.
    """
    reasons: dict[str, str] = {}
    fitted = corrections = next_use = None
    if config.prefetch in FITTED_PREFETCH:
        fitted = fitted_of(place, config.prefetch)
    if config.prefetch == CORRECTED_GATES:
        found = corrections_of(place, spec, config.prefetch_depth or DEFAULT_PREFETCH_DEPTH)
        corrections, reasons["prefetch"] = found.corrections, str(found)
    if config.eviction == LEARNED:
        next_use, reasons["eviction"] = next_use_of(place, {site.layer: site.experts for site in spec.sites})
    return Learned(fitted, corrections, next_use), reasons
