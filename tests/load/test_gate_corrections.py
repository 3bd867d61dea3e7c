"""Learned corrections: kept for one model, refused with what to do where they are not all there or another's.

Would catch: corrections of other shapes or layers believed, a pair that is missing taken for zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.load.gate_corrections import LearnedCorrections
from smoe.load.learned import learned_by
from smoe.load.learned_file import path_of
from smoe.models.read_spec import read_spec
from smoe.policy.registry import CORRECTED_GATES, predictor_kind
from smoe.prediction.correction import Correction
from tests import zoo

Open = Callable[..., PreTrainedModel]


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


def read(folder: Path, depth: int) -> LearnedCorrections:
    spec = read_spec(str(folder), EngineConfig())
    found: LearnedCorrections = learned_by(predictor_kind(CORRECTED_GATES), CORRECTED_GATES, folder, spec, depth)
    return found


def test_what_is_kept_is_found_to_the_last_bit(folder: Path) -> None:
    kept = learned()
    assert kept.store(folder) == path_of(CORRECTED_GATES, folder)
    found = read(folder, 2)
    assert found.origin == "corrections learned on 900 tokens of mine.txt"
    assert found.corrections.keys() == kept.corrections.keys()
    for pair, correction in found.corrections.items():
        assert all(torch.equal(a, b) for a, b in zip(correction[:3], kept.corrections[pair][:3], strict=True))
        assert correction[3:] == kept.corrections[pair][3:]


@pytest.mark.parametrize(("depth", "pairs"), [(1, 3), (2, 5), (16, 5)])
def test_no_further_than_asked_for_and_learned(depth: int, pairs: int, folder: Path) -> None:
    learned(2).store(folder)
    assert len(read(folder, depth).corrections) == pairs


def test_without_any_it_is_said_what_to_run(folder: Path, open_model: Open) -> None:
    with pytest.raises(ConfigError, match=r"no tuned values are stored .* run smoe tune on the model with") as raised:
        open_model(folder, "half", prefetch="corrected-gates")
    assert raised.value.setting == "prefetch"


@pytest.mark.parametrize("wrong", ["missing", "shape", "nan", "confidence"])
def test_what_does_not_fit_is_refused(wrong: str, folder: Path, toy: Callable[..., Path]) -> None:
    kept = learned()
    corrections = dict(kept.corrections)
    if wrong == "missing":
        del corrections[1, 2]
    elif wrong == "confidence":
        corrections[0, 9] = corrections.pop((0, 1))
    else:
        weight = torch.zeros(zoo.EXPERTS, 100) if wrong == "shape" else torch.full((zoo.EXPERTS, 128), torch.nan)
        corrections[0, 1] = corrections[0, 1]._replace(weight=weight)
    replace(kept, corrections=corrections).store(folder)
    with pytest.raises(
        ConfigError, match=r"that predict layer [12] at layer [01] are missing or do not fit this model; run smoe tune"
    ):
        read(folder, 1)


def test_a_loaded_model_says_where_they_are_from(folder: Path, open_model: Open) -> None:
    learned().store(folder)
    engine = open_model(folder, "half", prefetch="corrected-gates").offload
    assert engine.reasons == {"prefetch": "corrections learned on 900 tokens of mine.txt"}
    assert not open_model(folder, "half", prefetch="stacked-gates").offload.reasons
