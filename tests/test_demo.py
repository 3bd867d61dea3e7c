"""The embedded demonstration model: small, whole, and the same text at every budget and in plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from smoe.models.files import DEMO_FOLDER
from tests import oracle

pytestmark = pytest.mark.skipif(
    not (DEMO_FOLDER / "model.safetensors").exists(), reason="the embedded model is not in this tree"
)
Open = Callable[..., PreTrainedModel]
MAX_BYTES = 40 * 10**6
TEXT = "Once upon a time there was a little girl named Lily."
NEW_TOKENS = 40


def prompt() -> torch.Tensor:
    ids: torch.Tensor = AutoTokenizer.from_pretrained(DEMO_FOLDER)(TEXT, return_tensors="pt").input_ids
    return ids


def steps(model: PreTrainedModel) -> oracle.Steps:
    return oracle.greedy(model, prompt(), NEW_TOKENS)


@cache
def reference_steps() -> oracle.Steps:
    return steps(oracle.reference(DEMO_FOLDER))


def test_it_is_small_enough_to_embed() -> None:
    """What smoe pack has written there is no part of it."""
    embedded = [path for path in DEMO_FOLDER.iterdir() if path.suffix != ".smoe"]
    assert sum(path.stat().st_size for path in embedded) <= MAX_BYTES


def test_the_tokenizer_gives_back_what_it_was_given() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    assert tokenizer.decode(prompt()[0], skip_special_tokens=True).strip() == TEXT
    assert prompt().shape[1] < len(TEXT) / 2


@pytest.mark.parametrize("budget", oracle.BUDGETS)
def test_text_is_equal_at_every_budget(budget: str, open_model: Open) -> None:
    model = open_model(DEMO_FOLDER, budget, kernels="native")
    assert model.dtype is torch.bfloat16
    assert not model.offload.store.is_staged, "the demo is meant to be read in place"
    ours = steps(model)
    oracle.assert_same_steps(ours, reference_steps())
    if budget == "minimum":
        counters = model.offload.stats()
        assert counters.decode_hits < counters.decode_uses


def test_the_text_is_a_story() -> None:
    """Not a quality test: would catch weights or a tokenizer of another training run."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    text = tokenizer.decode(reference_steps().tokens[0, prompt().shape[1] :], skip_special_tokens=True)
    words = text.split()
    assert len(words) > NEW_TOKENS / 3
    assert sum(word.strip(".,!?\"'").isalpha() for word in words) > 0.8 * len(words)
