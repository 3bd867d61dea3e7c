"""Stored values learned of a model, as a configuration needs them; they count in the budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from smoe.bounds import CORRECTED_GATES
from smoe.config import EngineConfig
from smoe.models.spec import ModelSpec
from smoe.policy.eviction.learned import NextUse
from smoe.policy.registry import EXPERT_MLP, FITTED_PREFETCH, LEARNED

if TYPE_CHECKING:
    from smoe.prediction.correction import Correction
    from smoe.prediction.fitted import Fitted


class LearnedValues(NamedTuple):
    """Each None where nothing asks for it."""

    fitted: Fitted | None = None
    """The predictor of decode that was fitted on traces."""
    corrections: Mapping[tuple[int, int], Correction] | None = None
    """The routers' corrections, where they predict."""
    next_use: NextUse | None = None
    """The estimates of the next use, where residents are ranked by them."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory, without the corrections: the predictor's own copy of them is counted with the predictor."""
        return sum(each.nbytes for each in (self.fitted, self.next_use) if each is not None)


def expected_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes of memory of a predictor that the settings ask for and that has not been fitted yet; 0 for those that are
    counts alone."""
    if config.prefetch != EXPERT_MLP:
        return 0
    from smoe.load.learned_tensors import expert_mlp_bytes

    return expert_mlp_bytes(spec)


def learned_of(config: EngineConfig, place: Path, spec: ModelSpec) -> tuple[LearnedValues, dict[str, str]]:
    """(what the model in `place` needs, where it comes from by setting).

    Raises `ConfigError` where something is asked for that has not been learned of these weights.
    """
    if config.prefetch not in (*FITTED_PREFETCH, CORRECTED_GATES) and config.eviction != LEARNED:
        return LearnedValues(), {}
    from smoe.load.learned_tensors import read_learned  # these are torch's

    return read_learned(config, place, spec)
