"""Which activation a family's experts have, found by trying: on the library's own modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from smoe.gpu_kernels.activation import Activation, activation_of


def found(activate: Any, has_gate: bool = True, **attributes: float) -> Activation | None:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return activation_of(module, activate, has_gate)


def halves(curve: Any) -> Any:
    def activate(wide: torch.Tensor) -> torch.Tensor:
        gate, up = wide.chunk(2, -1)
        return curve(gate) * up

    return activate


@pytest.mark.parametrize(
    ("curve", "name"),
    [
        (functional.silu, "silu"),
        (functional.gelu, "gelu"),
        (lambda x: functional.gelu(x, approximate="tanh"), "gelu_tanh"),
        (functional.relu, "relu"),
        (lambda x: functional.relu(x) ** 2, "relu2"),
    ],
)
def test_curves(curve: Any, name: str) -> None:
    assert found(halves(curve)) == Activation(name)
    assert found(curve, has_gate=False) == Activation(name, has_gate=False)


def test_the_library_s_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    config = GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)
    with torch.device("meta"):
        module = GptOssExperts(config)
    wanted = Activation("silu", takes_turns=True, alpha=module.alpha, limit=module.limit, shift=1.0)
    assert activation_of(module, module._apply_gate, True) == wanted


def test_limits_in_halves() -> None:
    """DeepSeek-V4's and MiniMax-M3's."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts

    fourth: Any = SimpleNamespace(limit=5.0, act_fn=functional.silu)
    assert found(lambda wide: DeepseekV4Experts._apply_gate(fourth, wide), limit=5.0) == Activation("silu", limit=5.0)
    third: Any = SimpleNamespace(swiglu_limit=7.0, swiglu_alpha=1.702)
    wanted = Activation("silu", alpha=1.702, limit=7.0, shift=1.0)
    found_third = found(lambda wide: MiniMaxM3VLExperts._apply_gate(third, wide), swiglu_limit=7.0, swiglu_alpha=1.702)
    assert found_third == wanted


def test_what_is_unknown_is_none() -> None:
    assert found(halves(torch.tanh)) is None
    assert found(lambda wide: wide) is None
    assert found(halves(lambda gate: functional.silu(gate).clamp(max=3.0)), limit=3.0) is None, "after the curve"

    def fails(wide: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such shape")

    assert found(fails) is None
