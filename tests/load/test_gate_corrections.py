"""Learned corrections: kept for one model, refused with what to do where they are not all there or another's.

Would catch: corrections of other weights believed, a truncated file that guesses at random, a newer format misread.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.load.gate_corrections import LearnedCorrections, corrections_of, place_of, remember
from smoe.models.read_spec import read_spec
from smoe.models.spec import ModelSpec
from smoe.prediction.correction import Correction
from tests import zoo

Open = Callable[..., PreTrainedModel]
AGAIN = "run smoe tune on it with `predictor` corrected-gates and some of your `text` again"


@pytest.fixture
def folder(toy: Callable[..., Path], own_cache: None) -> Path:
    return toy("mixtral")


def learned(layers_ahead: int = 2) -> LearnedCorrections:
    pairs = [(layer, after) for layer in range(4) for after in range(layer + 1, min(4, layer + 1 + layers_ahead))]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shape = (zoo.EXPERTS, 128)
    return LearnedCorrections(
        {pair: Correction(random(*shape), random(shape[0]), random(shape[0]), pair[0] + 2.5, -0.1) for pair in pairs},
        900,
        "mine.txt",
    )


def spec_of(folder: Path) -> ModelSpec:
    return read_spec(str(folder), EngineConfig())


def rewritten(path: Path, tensors: dict[str, torch.Tensor] | None = None, **metadata: str) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        kept = file.metadata()
    save_file(load_file(path) if tensors is None else tensors, path, kept | metadata)


def test_what_is_kept_is_found_to_the_last_bit(folder: Path) -> None:
    kept = learned()
    assert remember(folder, kept) == place_of(folder)
    found = corrections_of(folder, spec_of(folder), 2)
    assert str(found) == "corrections learned on 900 tokens of mine.txt"
    assert found.corrections.keys() == kept.corrections.keys()
    for pair, correction in found.corrections.items():
        assert all(torch.equal(a, b) for a, b in zip(correction[:3], kept.corrections[pair][:3], strict=True))
        assert correction[3:] == kept.corrections[pair][3:]


@pytest.mark.parametrize(("depth", "pairs"), [(1, 3), (2, 5), (16, 5)])
def test_no_further_than_asked_for_and_learned(depth: int, pairs: int, folder: Path) -> None:
    remember(folder, learned(2))
    assert len(corrections_of(folder, spec_of(folder), depth).corrections) == pairs


def test_without_any_it_is_said_what_to_run(folder: Path, open_model: Open) -> None:
    with pytest.raises(ConfigError, match="nothing has been learned yet for this model: run smoe tune on it") as raised:
        open_model(folder, "half", prefetch="corrected-gates")
    assert raised.value.setting == "prefetch"


def test_of_other_weights_they_are_refused(folder: Path, toy: Callable[..., Path]) -> None:
    """The same place, other weights in it: a model that was trained on."""
    remember(folder, learned())
    other = toy("mixtral", seed=1)
    place_of(folder).rename(place_of(other))
    with pytest.raises(ConfigError, match=f"learned with other weights than this model's: {AGAIN}"):
        corrections_of(other, spec_of(other), 1)


def test_of_another_format_they_are_refused(folder: Path) -> None:
    rewritten(remember(folder, learned()), format="2")
    with pytest.raises(ConfigError, match=f"is of format 2, this version reads 1: {AGAIN}"):
        corrections_of(folder, spec_of(folder), 1)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_they_are_refused(keep: int, folder: Path) -> None:
    path = remember(folder, learned())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match="damaged"):
        corrections_of(folder, spec_of(folder), 1)


def test_half_of_them_are_refused(folder: Path) -> None:
    path = remember(folder, learned())
    tensors = load_file(path)
    rewritten(path, {name: value for name, value in tensors.items() if name != "1.2.bias"})
    with pytest.raises(ConfigError, match=r"damaged.*1\.2\.bias"):
        corrections_of(folder, spec_of(folder), 1)
    rewritten(path, tensors, confidence=json.dumps({"0.1": [1.0, 2.0]}))
    with pytest.raises(ConfigError, match="damaged"):
        corrections_of(folder, spec_of(folder), 1)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(zoo.EXPERTS, 100), torch.full((zoo.EXPERTS, 128), torch.nan)], ids=["shape", "nan"]
)
def test_what_does_not_fit_is_refused(wrong: torch.Tensor, folder: Path) -> None:
    path = remember(folder, learned())
    rewritten(path, load_file(path) | {"0.1.weight": wrong})
    with pytest.raises(ConfigError, match=f"does not fit layer 1 of this model: {AGAIN}"):
        corrections_of(folder, spec_of(folder), 1)


def test_a_loaded_model_says_where_they_are_from(folder: Path, open_model: Open) -> None:
    remember(folder, learned())
    engine = open_model(folder, "half", prefetch="corrected-gates").offload
    assert engine.reasons == {"prefetch": "corrections learned on 900 tokens of mine.txt"}
    assert not open_model(folder, "half", prefetch="stacked-gates").offload.reasons
