"""The learned values of a model that its settings need. They count in the memory budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from smoe.config import EngineConfig
from smoe.models.spec import ModelSpec
from smoe.policy.eviction.learned import NextUse
from smoe.policy.registry import CORRECTED_GATES, eviction_kind, predictor_kind

if TYPE_CHECKING:
    from smoe.prediction.correction import Correction
    from smoe.prediction.fitted import Fitted


class LearnedValues(NamedTuple):
    """Values that `smoe tune` has learned for one model. A value is None if the settings do not need it."""

    fitted: Fitted | None = None
    """The predictor for decode that was fitted to traces."""
    corrections: Mapping[tuple[int, int], Correction] | None = None
    """The corrections of routers for the predictor `corrected-gates`, by (layer of the input, predicted layer)."""
    next_use: NextUse | None = None
    """The estimates of each expert's next use, for the eviction policy `learned`."""

    @property
    def nbytes(self) -> int:
        """The size in bytes of the learned values. Router corrections are not included, because the memory budget
        counts them with their predictor."""
        return sum(each.nbytes for each in (self.fitted, self.next_use) if each is not None)


def expected_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the size in bytes that the configured predictor will have once it has been fitted; 0 if it stores only
    counts."""
    return predictor_kind(config.prefetch).bytes_to_fit(spec)


def learned_of(config: EngineConfig, place: Path, spec: ModelSpec) -> tuple[LearnedValues, dict[str, str]]:
    """Return the learned values for the model in `place`, and for each a text that says where it comes from, by
    setting.

    Raises `ConfigError` if a required value has not been learned for these weights.
    """
    is_learned = predictor_kind(config.prefetch).is_fitted or config.prefetch == CORRECTED_GATES
    if not is_learned and not eviction_kind(config.eviction).is_trained:
        return LearnedValues(), {}
    from smoe.load.learned_tensors import read_learned  # requires torch

    return read_learned(config, place, spec)
