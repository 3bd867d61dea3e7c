"""Products of the image encoder in float32, where the CPU has no instructions for bf16."""

from __future__ import annotations

import torch
from torch import nn

from smoe.models.wide_linears import widen


def test_results_are_nearer_to_exact_ones() -> None:
    """For more rows than one piece has, with and without a bias; few rows are computed as before."""
    torch.manual_seed(0)
    for bias in (True, False):
        linear = nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16)
        x = torch.randn(2, 300, 64).bfloat16()
        with torch.no_grad():
            before, few = linear(x), linear(x[:, :3])
            widen(linear)
            widen(linear)
            after = linear(x)
            exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
        assert after.shape == before.shape and after.dtype is torch.bfloat16
        assert torch.equal(linear(x[:, :3]), few)
        assert float((after - exact).abs().max()) <= float((before - exact).abs().max())
        assert torch.allclose(after.double(), exact, rtol=2**-8, atol=2**-8)


def test_other_types_are_left_alone() -> None:
    linear = nn.Linear(8, 8)
    widen(nn.Sequential(linear))
    assert "forward" not in vars(linear)
