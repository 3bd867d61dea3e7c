"""The gated delta rule of one token in place: equal to transformers' up to rounding, for models that may round.

Would catch: a state that is changed twice or not at all, heads that take another head's key, another model of the same
process whose bits change.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.fastpath import delta_rule
from smoe.kernels import delta_token
from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import SpinningPool
from tests import families, oracle, promised

ROWS, KEY_HEADS, HEADS, KEYS, VALUES = 2, 3, 6, 16, 24


@pytest.fixture
def pool() -> Iterator[SpinningPool]:
    promised.needs(widest() is not None, promised.MACHINE_CODE)
    with SpinningPool(2, in_own_order=True) as found:
        yield found


def given(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    return {
        "query": numbers(ROWS, 1, KEY_HEADS, KEYS).to(dtype),
        "key": numbers(ROWS, 1, KEY_HEADS, KEYS).to(dtype),
        "value": numbers(ROWS, 1, HEADS, VALUES).to(dtype),
        "g": -numbers(ROWS, 1, HEADS).exp(),
        "beta": numbers(ROWS, 1, HEADS).sigmoid().to(dtype),
        "initial_state": numbers(ROWS, HEADS, KEYS, VALUES),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_rule_of_transformers(dtype: torch.dtype) -> None:
    file = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    rule = getattr(file.torch_recurrent_gated_delta_rule, "library", file.torch_recurrent_gated_delta_rule)
    theirs, their_state = rule(**given(dtype), output_final_state=True, use_qk_l2norm_in_kernel=True)
    query, key, value, decay, gate, state = given(dtype).values()
    ours = delta_rule.one_token(query, key, value, decay, gate, state)
    torch.testing.assert_close(state, their_state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5)


def test_a_model_in_place_beside_one_that_is_not(
    toy: Callable[..., Path], pool: SpinningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    once = delta_rule.one_token
    monkeypatch.setattr(delta_rule, "one_token", lambda *of: tokens.append(of[0].shape[1]) or once(*of))
    folder = toy("qwen3_next")
    expected = oracle.reference_steps(folder)
    ours: PreTrainedModel = oracle.reference(folder)
    layers = sum(kind == "linear_attention" for kind in ours.config.get_text_config().layer_types)
    delta_rule.speed_up(ours, pool)
    oracle.assert_same_steps(oracle.greedy(oracle.reference(folder)), expected)
    assert not tokens, "another model takes transformers' way"
    found = oracle.greedy(ours)
    assert len(tokens) == layers * (len(tokens) // layers) > 0
    assert torch.equal(found.prefill, expected.prefill)
    torch.testing.assert_close(
        torch.stack(list(found.logits)), torch.stack(list(expected.logits)), rtol=1e-3, atol=1e-3
    )


def test_a_failure_ends_it(pool: SpinningPool) -> None:
    class Failing(torch.nn.Module):
        A_log = None

        def forward(self) -> None:
            raise RuntimeError("no arithmetic today")

    module = Failing()
    Failing.__module__ = "transformers.models.qwen3_next.modeling_qwen3_next"
    importlib.import_module(Failing.__module__)
    assert delta_rule.speed_up(module, pool) == 0, "it has no kernel"
    with pytest.raises(RuntimeError, match="today"):
        module()
    assert not delta_rule._running.is_fast


WIDE = {"linear_key_head_dim": 32, "linear_value_head_dim": 48}
"""Sizes that the kernel has, and toys do not."""


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text"])
def test_one_kernel_computes_a_text(
    family: str, tmp_path: Path, pool: SpinningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, and two texts together, are computed by transformers, whose states the kernel continues."""
    tokens: list[int] = []
    attend = delta_token.attend
    monkeypatch.setattr(delta_token, "attend", lambda *of: tokens.append(of[1].heads) or attend(*of))
    folder = families.save(family, tmp_path, dtype=torch.bfloat16, **WIDE)
    expected, ours = oracle.reference_steps(folder), oracle.reference(folder)
    layers = delta_rule.speed_up(ours, pool)
    found = oracle.greedy(ours)
    assert len(tokens) == layers * (len(tokens) // layers) > 0
    assert torch.equal(found.prefill, expected.prefill)
    torch.testing.assert_close(
        torch.stack(list(found.logits)), torch.stack(list(expected.logits)), rtol=2e-2, atol=2e-2
    )
    tokens.clear()
    ours.generate(torch.tensor([[1, 2, 3], [4, 5, 6]]), max_new_tokens=3, do_sample=False)
    assert not tokens


def test_changed_modules_are_computed_by_transformers(
    tmp_path: Path, pool: SpinningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook on the norm, and an adapter in place of the convolution, must count for every token."""
    tokens: list[int] = []
    attend = delta_token.attend
    monkeypatch.setattr(delta_token, "attend", lambda *of: tokens.append(1) or attend(*of))
    ours = oracle.reference(families.save("qwen3_5_moe_text", tmp_path, dtype=torch.bfloat16, **WIDE))
    layers = [module for module in ours.modules() if hasattr(module, "A_log")]
    assert delta_rule.speed_up(ours, pool) == len(layers) > 1
    handle = layers[0].norm.register_forward_hook(lambda *of: None)
    for layer in layers[1:]:
        layer.conv1d = copy.deepcopy(layer.conv1d)
    oracle.greedy(ours)
    assert not tokens
    handle.remove()
    oracle.greedy(ours)
    assert tokens, "the hook is gone"
