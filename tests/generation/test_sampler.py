"""One text's choice of tokens, compared with the library's own processors in the library's order. Would catch a
setting that does not reach them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from smoe.generation.library_settings import generation_config
from smoe.generation.sampler import Sampler
from smoe.generation.sampling_settings import Sampling
from tests import oracle
from tests.generation.test_loop import NoText

DRAWS = 200


@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 20, 0.9), (1.8, 0, 1.0)])
def test_min_p_draws_as_the_library_does(
    min_p: float, temperature: float, top_k: int, top_p: float, toy: Callable[..., Path]
) -> None:
    model = oracle.reference(toy("qwen2_moe"))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=3)
    config = generation_config(model, NoText(), sampling, 9)
    sampler = Sampler(model, config, sampling, [5], None, None)
    warpers = [TemperatureLogitsWarper(temperature), *([TopKLogitsWarper(top_k)] if top_k else [])]
    warpers += [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    theirs = torch.Generator().manual_seed(3)
    chance = torch.Generator().manual_seed(8)
    allowed = 0
    for _ in range(DRAWS):
        logits = 2 * torch.randn(128, generator=chance)
        scores = logits[None]
        for warper in warpers:
            scores = warper(torch.tensor([[5]]), scores)
        allowed += int(torch.isfinite(scores).sum())
        expected = int(torch.multinomial(scores.softmax(-1), 1, generator=theirs))
        assert sampler.choose(logits)[0] == expected
    assert (allowed == DRAWS) == (min_p == 1.0)


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_repetition_penalty_has_the_librarys_effect_on_its_window(window: int, toy: Callable[..., Path]) -> None:
    model = oracle.reference(toy("qwen2_moe"))
    sampling = Sampling(repetition_penalty=1.7, repetition_window=window)
    config = generation_config(model, NoText(), sampling, 9)
    ids = [5, 6, 7, 8]
    sampler = Sampler(model, config, sampling, ids, None, None)
    penalty = RepetitionPenaltyLogitsProcessor(1.7)
    chance = torch.Generator().manual_seed(8)
    for _ in range(60):
        logits = torch.randn(128, generator=chance)
        logits[:12] += 2
        expected = int(penalty(torch.tensor([ids[-window:]]), logits[None].clone()).argmax())
        assert sampler.choose(logits)[0] == expected
        ids.append(expected)


def test_min_p_alone_is_a_wish_to_draw(toy: Callable[..., Path]) -> None:
    model = oracle.reference(toy("qwen2_moe"))
    config = generation_config(model, NoText(), Sampling(temperature=None, min_p=0.1), 9)
    assert config.do_sample and config.min_p == 0.1
    greedy = generation_config(model, NoText(), Sampling(min_p=0.1), 9)
    assert not greedy.do_sample and greedy.min_p is None
