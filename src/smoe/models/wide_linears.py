"""Computes linear layers of an image encoder in bf16 as products in float32, on CPUs without instructions for bf16.

On these CPUs torch computes products of many rows in bf16 three times slower than in float32 (docs/log/images.md). The
weights stay in bf16. A product converts its weights, which takes little time for many rows, and rounds its result once.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from smoe.kernels.isa import AVX512_BF16
from smoe.models.workspace import WIDE_ROWS

_FEWEST_ROWS = 32
"""With fewer rows, converting the weights takes longer than the product."""


def is_bf16_slow() -> bool:
    """Return whether this CPU has no instructions for products in bf16."""
    return platform.machine() in ("x86_64", "AMD64") and not AVX512_BF16.is_here


def widen(module: nn.Module) -> None:
    """Replace the forward functions of all bf16 linear layers within a module on a CPU, if the CPU needs it. Further
    calls have no effect."""
    for each in module.modules():
        if type(each) is nn.Linear and each.weight.dtype is torch.bfloat16 and each.weight.device.type == "cpu":
            each.forward = _in_float32(each)  # type: ignore[method-assign,assignment]


def _in_float32(linear: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) < _FEWEST_ROWS or x.dtype is not torch.bfloat16:
            return functional.linear(x, linear.weight, linear.bias)
        weight, bias = linear.weight.float(), None if linear.bias is None else linear.bias.float()
        out = x.new_empty(len(rows), linear.out_features)
        for begin in range(0, len(rows), WIDE_ROWS):
            out[begin : begin + WIDE_ROWS] = functional.linear(rows[begin : begin + WIDE_ROWS].float(), weight, bias)
        return out.view(*x.shape[:-1], linear.out_features)

    return forward
