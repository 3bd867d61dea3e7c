"""Attention of prompts by our kernel, behind the library's: where it stands in, and what is left to the library.

Would catch: a window, a padding or a future that is seen after all, a piece of a prompt that is not served, a wrong
kernel that is used, bits that change where bits are promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from smoe.fastpath import attention
from smoe.fastpath.prompt_attention import SeveralQueries, hides_the_future, is_accurate
from smoe.kernels.isa import widest
from smoe.kernels.prompt_attention import PromptAttention
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from tests import gguf_toy, oracle
from tests.models.test_gguf_quantised import assert_near, steps

pytestmark = pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
HEADS, KEY_HEADS, SIZE = SHAPE = 4, 2, 64
TOKENS, KEYS = 20, 50
Open = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def attend() -> Iterator[PromptAttention]:
    with SpinningPool(2, has_bf16=is_supported()) as pool:
        yield PromptAttention(pool)


def tensors(tokens: int = TOKENS, keys: int = KEYS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, HEADS, tokens, SIZE, generator=generator).bfloat16()
    return query, *torch.randn(2, 1, KEY_HEADS, keys, SIZE, generator=generator).bfloat16()


def causal(tokens: int = TOKENS, keys: int = KEYS) -> torch.Tensor:
    return torch.ones(1, 1, tokens, keys, dtype=torch.bool).tril(keys - tokens)


class Counting(SeveralQueries):
    """How often the kernel was asked."""

    calls = 0

    def __call__(self, *args: Any) -> torch.Tensor:
        type(self).calls += 1
        return super().__call__(*args)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    monkeypatch.setattr(attention, "SeveralQueries", Counting)
    Counting.calls = 0
    return Counting


def caller(attend: PromptAttention | None) -> nn.Module:
    """A module that calls the library's function, with the kernel or without."""
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = HEADS // KEY_HEADS, True  # type: ignore[assignment]
    if attend is not None:
        module.several_queries = Counting(attend, *SHAPE)  # type: ignore[assignment]
    return module


def answers(attend: PromptAttention, *given: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """With the kernel, and the library's."""
    attention._behind_the_name()
    registered, options = attention.ALL_ATTENTION_FUNCTIONS["sdpa"], {"scaling": 0.1} | options
    return tuple(registered(caller(each), *given, **options)[0] for each in (attend, None))  # type: ignore[return-value]


@pytest.mark.parametrize(("keys", "mask"), [(TOKENS, None), (TOKENS, causal(TOKENS, TOKENS)), (KEYS, causal())])
def test_prompts_and_their_pieces_are_served(
    keys: int, mask: torch.Tensor | None, attend: PromptAttention, counting: type[Counting]
) -> None:
    query, key, value = tensors(keys=keys)
    ours, theirs = answers(attend, query, key, value, mask)
    assert counting.calls == 1
    wide = (each.double().repeat_interleave(HEADS // KEY_HEADS, 1) for each in (key, value))
    exact = scaled_dot_product_attention(query.double(), *wide, attn_mask=causal(TOKENS, keys), scale=0.1)
    errors = [float((each.double() - exact.transpose(1, 2)).square().mean()) for each in (ours, theirs)]
    assert errors[0] <= 1.1 * errors[1]


def window() -> torch.Tensor:
    return causal() & ~causal().tril(KEYS - TOKENS - 12)


def padded() -> torch.Tensor:
    mask = causal()
    mask[..., :3] = False
    return mask


LEFT: dict[str, tuple[torch.Tensor | None, dict[str, Any]]] = {
    "a window": (window(), {}),
    "padding": (padded(), {}),
    "nothing hidden": (torch.ones_like(causal()), {}),
    "numbers": (torch.zeros(1, 1, TOKENS, KEYS).masked_fill(~causal(), float("-inf")).bfloat16(), {}),
    "of every head": (causal().expand(-1, HEADS, -1, -1), {}),
    "keys that a mask must name": (None, {}),
    "a bias": (causal(), {"position_bias": torch.ones(1, HEADS, TOKENS, KEYS).bfloat16()}),
    "no scale": (causal(), {"scaling": None}),
    "a negative scale": (causal(), {"scaling": -0.1}),
}


@pytest.mark.parametrize("name", LEFT)
def test_the_library_keeps_what_the_kernel_does_not_know(
    name: str, attend: PromptAttention, counting: type[Counting]
) -> None:
    mask, options = LEFT[name]
    ours, theirs = answers(attend, *tensors(), mask, **options)
    assert counting.calls == 0
    assert torch.equal(ours, theirs)


def test_what_is_not_causal_is_left(attend: PromptAttention, counting: type[Counting]) -> None:
    ours, theirs = answers(attend, *tensors(keys=TOKENS), None, is_causal=False)
    assert counting.calls == 0 and torch.equal(ours, theirs)
    answers(attend, *tensors(keys=TOKENS), None, is_causal=True)
    assert counting.calls == 1


def test_a_single_token_and_other_heads_are_left(attend: PromptAttention, counting: type[Counting]) -> None:
    for change in (lambda q, k, v: (q[:, :, :1], k, v), lambda q, k, v: (q[:, :2], k[:, :1], v[:, :1])):
        query, keys, values = change(*tensors())
        assert not SeveralQueries(attend, *SHAPE).serves(
            query, keys, values, causal(query.shape[2]), scale=0.1, is_causal=True
        )


@given(tokens=st.integers(1, 6), past=st.integers(0, 6), flips=st.lists(st.integers(0, 71), max_size=2))
def test_only_masks_that_hide_the_future_and_nothing_else_are_called_so(
    tokens: int, past: int, flips: list[int]
) -> None:
    mask = causal(tokens, past + tokens)
    for flip in flips:
        mask.view(-1)[flip % mask.numel()].logical_not_()
    assert hides_the_future(mask, tokens, past + tokens) == torch.equal(mask, causal(tokens, past + tokens))


def library() -> attention.Attention:
    return attention._behind_the_name()


def test_it_is_used_where_it_is_near(attend: PromptAttention) -> None:
    assert is_accurate(attend, library(), caller(None), *SHAPE)


class Wrong(PromptAttention):
    """A kernel of which every row sees one key too many, or too few."""

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return super().__call__(query, keys[:, :, 1:], values[:, :, 1:], scale)


def test_a_wrong_kernel_is_not_used(attend: PromptAttention) -> None:
    wrong = Wrong(attend._pool)
    assert not is_accurate(wrong, library(), caller(None), *SHAPE)


def having(model: PreTrainedModel) -> int:
    return sum(hasattr(module, "several_queries") for module in model.modules())


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A file in 8 bits, and the library's model of its numbers."""
    return gguf_toy.quantised(tmp_path_factory.mktemp("toy") / "toy.gguf", "Q8_0", head_dim=64)


def test_quantised_models_have_it(
    quantised: tuple[Path, PreTrainedModel], open_model: Open, counting: type[Counting]
) -> None:
    path, theirs = quantised
    model = open_model(path, "full", kernels="auto", activations="dtype")
    assert having(model) == model.config.num_hidden_layers
    counting.calls = 0  # a layer's proof calls it
    assert_near(steps(model, oracle.PROMPT), steps(theirs, oracle.PROMPT), 0.08, others=2)
    assert counting.calls == model.config.num_hidden_layers


def test_later_pieces_of_a_prompt_are_served(
    quantised: tuple[Path, PreTrainedModel], open_model: Open, counting: type[Counting]
) -> None:
    model = open_model(quantised[0], "full", kernels="auto", prefill_tokens=8)
    ids = torch.randint(3, 100, (1, 24), generator=torch.Generator().manual_seed(0))
    counting.calls = 0
    model.generate(ids, max_new_tokens=1, do_sample=False)
    assert counting.calls == 3 * model.config.num_hidden_layers


@pytest.mark.parametrize("switches", [{"kernels": "native"}, {"kernels": "torch"}, {"reproducible": True}])
def test_it_is_declined_with_the_other_arithmetic(
    switches: dict[str, Any], quantised: tuple[Path, PreTrainedModel], open_model: Open
) -> None:
    model = open_model(quantised[0], "full", **{"kernels": "auto", **switches})
    assert having(model) == 0


@pytest.mark.parametrize(("kernels", "is_there"), [("auto", False), ("native", False), ("own-order", True)])
def test_in_bf16_it_goes_with_our_own_order(
    kernels: str, is_there: bool, toy: Callable[..., Path], open_model: Open
) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16, hidden_size=256, head_dim=64)
    model = open_model(folder, "full", kernels=kernels)
    expected = is_there or model.offload.arithmetic == "own-order"
    assert having(model) == (model.config.num_hidden_layers if expected else 0)
