"""The layers beside the experts by our kernel.

Would catch a bias left out, a batch that is taken for one row, an input that is not in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.kernels.crew import Crew
from smoe.runtime import dense
from tests import oracle


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys are too small for it to be."""
    monkeypatch.setattr(dense, "_is_faster", lambda *_: True)


def test_only_plain_linear_layers_change(crew: Crew) -> None:
    class Other(nn.Linear):
        pass

    layers = [nn.Linear(64, 96, False), nn.Linear(64, 128), Other(64, 96, False), nn.Linear(64, 97, False)]
    model = nn.ModuleList(layers).bfloat16().requires_grad_(False)
    assert dense.speed_up(model, crew) == pytest.approx((96 + 128) / (96 + 128 + 97))
    assert [("forward" in layer.__dict__) for layer in layers] == [True, True, False, False]


@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 64), (64,), (3, 64), (1, 5, 64), (2, 1, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_every_shape_gives_the_librarys_bits(shape: tuple[int, ...], bias: bool, crew: Crew) -> None:
    layer = nn.Linear(64, 160, bias=bias).bfloat16().requires_grad_(False)
    x = torch.randn(shape).bfloat16()
    theirs = layer(x)
    dense.speed_up(layer, crew)
    assert torch.equal(layer(x), theirs)
    assert torch.equal(layer(x.expand(2, *shape)[0]), theirs)
    strided = torch.randn(*shape[:-1], 128).bfloat16()[..., ::2]
    assert torch.equal(layer(strided), nn.functional.linear(strided, layer.weight, layer.bias))


INNER = {"mixtral": "intermediate_size", "olmoe": "intermediate_size", "granitemoe": "intermediate_size"}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "deepseek_v3", "mixtral", "olmoe", "granitemoe", "dots1"])
@pytest.mark.parametrize("budget", ["full", "minimum"])
def test_whole_models_are_exact(
    family: str, budget: str, crew: Crew, toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    """Experts and the rest by our kernel, greedy decoding, every logit."""
    wide = {"hidden_size": 256, INNER.get(family, "moe_intermediate_size"): 64}
    folder = toy(family, dtype=torch.bfloat16, **wide)
    model = open_model(folder, budget, kernels="own")
    assert model.offload.executor.math.crew is not None, "experts were left to the library"
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    assert any("forward" in m.__dict__ for m in linears), "the other layers were left to the library"
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


def test_the_kernel_can_be_declined(toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model(toy("qwen3_moe", dtype=torch.bfloat16), "full", kernels="torch")
    assert not any("forward" in m.__dict__ for m in model.modules() if type(m) is nn.Linear)
