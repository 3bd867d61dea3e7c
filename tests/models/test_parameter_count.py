"""`num_parameters()` counts the whole model, as the library does for the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from transformers import PreTrainedModel

from smoe.models.files import DEMO_FOLDER
from tests import oracle

Open = Callable[..., PreTrainedModel]
Toy = Callable[..., Path]
FAMILIES = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exclude_embeddings", [False, True])
def test_it_is_the_library_s(family: str, exclude_embeddings: bool, toy: Toy, open_model: Open) -> None:
    folder = toy(family)
    theirs = oracle.reference(folder).num_parameters(exclude_embeddings=exclude_embeddings)
    assert open_model(folder, "minimum").num_parameters(exclude_embeddings=exclude_embeddings) == theirs


def test_it_is_the_library_s_of_the_demo(open_model: Open) -> None:
    model = open_model(DEMO_FOLDER, "minimum")
    assert model.num_parameters() == oracle.reference(DEMO_FOLDER).num_parameters()


def test_what_is_added_counts_and_nothing_else_can_be_trained(toy: Toy, open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    before = model.num_parameters()
    assert model.num_parameters(only_trainable=True) == 0
    model.model.layers[0].adapter = nn.Linear(3, 5, bias=False)
    assert model.num_parameters() == before + 15
    assert model.num_parameters(only_trainable=True) == 15
