"""Convolutions of single channels in float32: torch's bits, for every way in which families call them.

Would catch: a weight that loses its convolution on the way, channels that are cut wrongly, paddings that are dropped, a
convolution over several channels that is taken for one of each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from smoe.fastpath import convolution
from smoe.kernels.isa import widest
from smoe.kernels.verdicts import Verdicts
from tests import oracle, promised

CHANNELS = 48


@pytest.fixture
def no_convolution_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch as on a CPU with AVX2 alone."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


def layer(**more: Any) -> nn.Conv1d:
    torch.manual_seed(0)
    given = {"groups": CHANNELS, "padding": 3, "bias": True} | more
    return nn.Conv1d(CHANNELS, CHANNELS, 4, **given).bfloat16().requires_grad_(False)


def input_of(tokens: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, CHANNELS, tokens, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("tokens", [1, 4, 300])
@pytest.mark.parametrize("piece", [1, 1000, 1 << 21])
@pytest.mark.parametrize("bias", [False, True])
def test_its_bits_are_torchs(
    tokens: int, piece: int, bias: bool, no_convolution_in_bf16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "_PIECE_ELEMENTS", piece)
    ours, theirs, x = layer(bias=bias), layer(bias=bias), input_of(tokens)
    assert convolution.speed_up(nn.Sequential(ours), Verdicts(), may_round=True) == 1
    torch.testing.assert_close(ours(x), theirs(x))
    weight = ours.weight.squeeze(1)
    found = functional.conv1d(x, weight=weight.unsqueeze(1), bias=ours.bias, padding=3, groups=CHANNELS)
    assert torch.equal(found, ours(x))


def test_families_call_it(no_convolution_in_bf16: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    ours, once = layer(), convolution.convolved
    monkeypatch.setattr(convolution, "convolved", lambda *given, **more: calls.append(1) or once(*given, **more))
    convolution.speed_up(nn.Sequential(ours), Verdicts(), may_round=True)
    x = input_of(5)
    ours(x)
    functional.conv1d(x, ours.weight.squeeze(1).unsqueeze(1), ours.bias, padding=0, groups=CHANNELS)
    assert len(calls) == 2
    assert isinstance(ours.weight, nn.Parameter)
    assert torch.equal((x * ours.weight[:, 0, :1]).sum(-1), (x * layer().weight[:, 0, :1]).sum(-1))


@pytest.mark.parametrize("more", [{"groups": 1}, {"groups": CHANNELS // 2}, {"padding_mode": "circular"}])
def test_other_convolutions_stay(more: dict[str, Any], no_convolution_in_bf16: None) -> None:
    assert convolution.speed_up(nn.Sequential(layer(**more)), Verdicts(), may_round=True) == 0


def test_where_torch_has_one_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert convolution.speed_up(nn.Sequential(layer()), Verdicts(), may_round=True) == 0


@pytest.mark.parametrize("bias", [False, True])
def test_a_proof_holds_for_layers_with_or_without_bias(
    bias: bool, no_convolution_in_bf16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(convolution, "_agrees", lambda length, has_bias: asked.append(has_bias) or True)
    assert convolution.speed_up(nn.Sequential(layer(bias=bias)), Verdicts(), may_round=False) == 1
    assert asked == [bias]


def test_other_bits_are_refused(no_convolution_in_bf16: None, monkeypatch: pytest.MonkeyPatch) -> None:
    once = convolution.convolved
    monkeypatch.setattr(convolution, "convolved", lambda *given, **more: once(*given, **more) * 1.01)
    assert convolution.speed_up(nn.Sequential(layer()), Verdicts(), may_round=False) == 0


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2_moe"])
def test_a_models_text_is_the_same(
    family: str,
    toy: Callable[..., Path],
    open_model: Callable[..., PreTrainedModel],
    no_convolution_in_bf16: None,
) -> None:
    promised.needs(widest() is not None, "machine code of our own")
    folder = toy(family, dtype=torch.bfloat16)
    model = open_model(folder, "half", kernels="native")
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Conv1d)]
    assert weights and all(isinstance(weight, convolution.ChannelWeight) for weight in weights)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
