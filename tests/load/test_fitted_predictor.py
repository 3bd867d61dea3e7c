"""Fitted predictors: kept for one model, refused where they do not belong.

Would catch: one predictor taken for another, its memory not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.load.fitted_predictor import StoredPredictor
from smoe.load.learned_file import ModelShape, path_of
from smoe.prediction.activation_path import Paths, RoutedLayer
from smoe.prediction.fitted import Fitted, counted
from tests import zoo


@pytest.fixture
def folder(tmp_path: Path, own_cache: None) -> Path:
    zoo.save("mixtral", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def fitted() -> Fitted:
    layers = tuple(RoutedLayer(layer, 8, 2) for layer in range(4))
    chosen = np.random.default_rng(1).permuted(np.tile(np.arange(8), (50, 4, 1)), axis=-1)[..., :2]
    return counted("affinity", Paths(layers, chosen, np.zeros(50, dtype=np.int64)))


def read(folder: Path, name: str) -> Fitted:
    return StoredPredictor.read(name, folder, ModelShape({})).fitted


def test_what_is_kept_comes_back(folder: Path, fitted: Fitted) -> None:
    path = StoredPredictor(fitted).store(folder)
    assert path == path_of("affinity", folder) and path.suffix == ".safetensors"
    found = read(folder, "affinity")
    assert (found.name, found.layers, found.tokens) == (fitted.name, fitted.layers, 50)
    assert torch.equal(found.tensors["affinity"], fitted.tensors["affinity"])


def test_what_was_not_fitted_is_refused_with_a_way_out(folder: Path, fitted: Fitted) -> None:
    StoredPredictor(fitted).store(folder)
    with pytest.raises(
        ConfigError, match=r"no tuned values are stored .* run smoe tune on the model with `predictor=popularity`"
    ):
        read(folder, "popularity")


def test_another_predictor_under_its_name_is_refused(folder: Path, fitted: Fitted) -> None:
    StoredPredictor(fitted).store(folder).rename(path_of("popularity", folder))
    with pytest.raises(
        ConfigError, match="holds the values of the predictor affinity, not of popularity; run smoe tune"
    ):
        read(folder, "popularity")


def test_a_model_is_loaded_with_its_predictor_or_not_at_all(
    folder: Path, fitted: Fitted, open_model: Callable[..., PreTrainedModel]
) -> None:
    with pytest.raises(ConfigError, match="no tuned values are stored"):
        open_model(folder, "half", prefetch="affinity")
    StoredPredictor(fitted).store(folder)
    ledger = open_model(folder, "half", prefetch="affinity").offload.ledger
    assert ledger.entries()["learned"] == fitted.nbytes == 3 * 8 * 8 * 4
