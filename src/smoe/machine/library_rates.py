"""Measures the rates of torch's products, for machines on which our kernels do not run."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from smoe.machine.best_time import best_time


def measure_library_experts(hidden: int, inner: int, experts: int, seconds: float) -> float:
    """Return the rate at which torch computes one token through `experts` experts, one after the other, as bytes of
    weights per second."""
    up = torch.zeros(experts, 2 * inner, hidden, dtype=torch.bfloat16)
    down = torch.zeros(experts, hidden, inner, dtype=torch.bfloat16)
    x = torch.zeros(1, hidden, dtype=torch.bfloat16)

    def all_experts() -> None:
        for n in range(experts):
            gate, value = linear(x, up[n]).chunk(2, dim=-1)
            linear(silu(gate) * value, down[n])

    with torch.no_grad():
        return experts * 3 * hidden * inner * 2 / best_time(all_experts, seconds)


def measure_library_products(seconds: float) -> float:
    """Return the rate of a bf16 product of many rows, in operations per second. It limits the speed of prompts."""
    rows, matrix = (torch.ones(size, 1024, dtype=torch.bfloat16) for size in (256, 1024))
    return 2 * 256 * 1024 * 1024 / best_time(lambda: linear(rows, matrix), seconds)
