"""Fitted weights: kept for one model, believed where they can be, used where none are given.

Would catch: another model's weights, a broken or newer file believed, weights that were given replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from smoe.load.cache_weights import FittedWeights, cache_weights_of
from smoe.policy.eviction.multidimensional import WEIGHTS

FITTED = FittedWeights((0.5, 0.25, 0.25, 0.0), 0.4, 900)


def test_what_was_fitted_is_for_its_model(folder: Path) -> None:
    weights, why = cache_weights_of(folder)
    assert weights == WEIGHTS and "the usual ones; smoe tune --cache" in why
    FITTED.store(folder)
    weights, why = cache_weights_of(folder)
    assert weights == FITTED.weights
    assert why == "as fitted on 900 recorded steps with 40% of the experts resident"


@pytest.mark.parametrize("change", [{"weights": [1, 1, 0, 0]}, {"weights": 1}, {"more": 0}])
def test_what_cannot_be_understood_is_as_nothing(folder: Path, change: dict[str, object]) -> None:
    path = FITTED.store(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert cache_weights_of(folder)[0] == WEIGHTS


def test_a_loaded_model_has_them(
    toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], folder: Path
) -> None:
    source = toy("qwen3_moe")
    FITTED.store(source)
    engine = open_model(source, "half", eviction="multidimensional").offload
    assert engine.config.cache_weights == FITTED.weights and "as fitted" in engine.reasons["cache_weights"]
    given = open_model(source, "half", eviction="multidimensional", cache_weights=(0.0, 1.0, 0.0, 0.0)).offload
    assert given.config.cache_weights == (0.0, 1.0, 0.0, 0.0) and not given.reasons
    other = open_model(source, "half").offload
    assert other.config.cache_weights is None and not other.reasons
