"""Positions as published configurations have them: how many a model takes, and the library's bits on all of them.

Would catch: a rotary embedding that reads positions where there are none (a model that does not load), a limit below
what a model card promises, and factors of another length.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from smoe import from_pretrained
from smoe.errors import ConfigError
from smoe.models.finish_spec import position_limit
from smoe.models.rotary import LengthRule, length_rule
from tests import oracle, published_rope
from tests.published_rope import ORIGINAL, PUBLISHED

TOKENS = torch.randint(3, 110, (1, 64), generator=torch.Generator().manual_seed(7))
BY_LENGTH = [name for name, published in PUBLISHED.items() if published.is_by_length]
LIMITS = {
    "Phi-3.5-MoE": 32,
    "DeepSeek-V2-Lite": 40,
    "DeepSeek-V3": 40,
    "Kimi-K2": 32,
    "gpt-oss": 32,
    "Qwen3, YaRN by its card": 4,
    "Qwen2, YaRN by its card": 4,
    "Qwen3-Next, YaRN by its card": 4,
    "Llama-4-Scout": 1280,
    "llama3": 16,
    "Mistral-Small-4": 128,
    "HunYuan-A13B": 8,
    "GLM-4.5": 32,
    "linear": 4,
    "dynamic": 4,
    "longrope in another family": 4,
    "proportional, by layers": 8,
    "yarn, by layers": 4,
    "dynamic, by layers": 4,
}
"""Of some configurations, the positions in multiples of the original length."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = published_rope.save(name, tmp_path_factory.mktemp("published"))
        return folders[name]

    return save


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_are_the_librarys_below_across_and_beyond_the_original_length(
    name: str, saved: Callable[[str], Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    folder = saved(name)
    model, theirs = open_model(folder, "half"), published_rope.reference(name, folder)
    for tokens, new_tokens in ((ORIGINAL + 16, 6), (ORIGINAL - 6, 10), (ORIGINAL + 4, 3), (8, 4)):
        if name in BY_LENGTH:  # the library's factors may be those of a longer text before
            theirs = published_rope.reference(name, folder)
        prompt = TOKENS[:, :tokens]
        oracle.assert_same_steps(oracle.greedy(model, prompt, new_tokens), oracle.greedy(theirs, prompt, new_tokens))


@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_prompt_read_in_pieces_has_the_factors_of_the_whole(
    name: str, saved: Callable[[str], Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    folder, prompt = saved(name), TOKENS[:, : ORIGINAL + 8]
    theirs = published_rope.reference(name, folder)(prompt).logits[0, -1].detach()
    model = open_model(folder, "half", prefill_tokens=12)
    made = model.generate(prompt, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True)
    assert oracle.relative_error(made.logits[0][0], theirs) < 1e-5


@pytest.mark.parametrize(("name", "multiple"), LIMITS.items())
def test_a_context_may_be_as_long_as_the_configuration_promises(
    name: str, multiple: int, saved: Callable[[str], Path]
) -> None:
    folder, limit = saved(name), multiple * ORIGINAL
    assert position_limit(AutoConfig.from_pretrained(folder)) == limit
    with pytest.raises(ConfigError, match=f"give at most {limit}"):
        from_pretrained(folder, context_tokens=limit + 1)


def test_a_configuration_without_a_limit_or_with_an_odd_one_has_none() -> None:
    config = AutoConfig.for_model("mixtral")
    for odd in (None, 0, True, "many"):
        object.__setattr__(config, "max_position_embeddings", odd)
        assert position_limit(config) is None


def test_which_lengths_turn_positions_alike() -> None:
    switching, growing = LengthRule(switches=frozenset({32})), LengthRule(grows_beyond=32)
    assert not LengthRule() and switching and growing
    assert switching.factors(1) == switching.factors(32) != switching.factors(33) == switching.factors(900)
    assert growing.factors(1) == growing.factors(32)
    assert len({growing.factors(length) for length in (32, 33, 34)}) == 3
    assert (switching | growing) == LengthRule(frozenset({32}), 32)


@pytest.mark.parametrize("name", PUBLISHED)
def test_only_kinds_that_look_at_the_length_have_a_rule(name: str, saved: Callable[[str], Path]) -> None:
    model = published_rope.reference(name, saved(name))
    assert bool(length_rule(model)) == (name in BY_LENGTH)
