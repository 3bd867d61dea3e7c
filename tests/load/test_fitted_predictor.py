"""Fitted predictors: kept for one model, refused where they do not belong.

Would catch: a predictor of other weights believed, a file cut short or changed that is read as if whole, a new format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.load.fitted_predictor import fitted_of, place_of, remember
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


def test_what_is_kept_comes_back(folder: Path, fitted: Fitted) -> None:
    path = remember(folder, fitted)
    assert path == place_of(folder, "affinity") and path.suffix == ".safetensors"
    found = fitted_of(folder, "affinity")
    assert (found.name, found.layers, found.tokens) == (fitted.name, fitted.layers, 50)
    assert torch.equal(found.tensors["affinity"], fitted.tensors["affinity"])
    written = path.read_bytes()
    assert remember(folder, fitted).read_bytes() == written, "the same bytes every time"


def test_what_was_not_fitted_is_refused_with_a_way_out(folder: Path, fitted: Fitted) -> None:
    remember(folder, fitted)
    with pytest.raises(
        ConfigError, match=r"has not been fitted .* run smoe tune on the model with `predictor` popularity"
    ):
        fitted_of(folder, "popularity")


def test_other_weights_in_the_same_place_are_refused(folder: Path, fitted: Fitted) -> None:
    remember(folder, fitted)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="other weights"):
        fitted_of(folder, "affinity")


@pytest.mark.parametrize("kept", [0.99, 0.5, 0.001, 0.0])
def test_a_file_that_was_cut_short_is_refused(kept: float, folder: Path, fitted: Fitted) -> None:
    path = remember(folder, fitted)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(ConfigError, match="truncated or damaged"):
        fitted_of(folder, "affinity")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "is of format 2, this smoe reads format 1"),
        ({"predictor": "popularity"}, "not what its header says"),
        ({"tensors": "0"}, "not what its header says"),
        ({"checkpoint": "0"}, "other weights"),
    ],
)
def test_what_says_that_it_is_something_else_is_refused(
    change: dict[str, object], says: str, folder: Path, fitted: Fitted
) -> None:
    path = remember(folder, fitted)
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["smoe"])
    save_file(dict(fitted.tensors), path, {"smoe": json.dumps(said | change)})
    with pytest.raises(ConfigError, match=says):
        fitted_of(folder, "affinity")


def test_a_file_of_somebody_else_is_refused(folder: Path, fitted: Fitted) -> None:
    path = remember(folder, fitted)
    save_file(dict(fitted.tensors), path)
    with pytest.raises(ConfigError, match="is of format None"):
        fitted_of(folder, "affinity")


def test_a_model_is_loaded_with_its_predictor_or_not_at_all(
    folder: Path, fitted: Fitted, open_model: Callable[..., PreTrainedModel]
) -> None:
    with pytest.raises(ConfigError, match="has not been fitted"):
        open_model(folder, "half", prefetch="affinity")
    remember(folder, fitted)
    ledger = open_model(folder, "half", prefetch="affinity").offload.ledger
    assert ledger.entries()["fitted predictor"] == fitted.nbytes == 3 * 8 * 8 * 4
