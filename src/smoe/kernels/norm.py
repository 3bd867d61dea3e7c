"""Computes RMSNorm of a few rows in one function with torch's bits, where transformers uses eight operations.

    mean    =    (x0 * x0 + x1 * x1 + ...) / size        float32
    out     =    bf16(weight * bf16(x * (1 / sqrt(mean + eps))))
    out     =    bf16((1 + weight) * (x * (1 / sqrt(mean + eps))))        a weight around zero, as in Qwen3.5 and Gemma

Everything except the sum is a sequence of single roundings, so only the order of torch's sum must be reproduced. torch
reads a row in registers of 8 numbers, even on CPUs with wider ones, and adds them to four accumulators:

    register       0  1  2  3  4  5  6  7  8 ...
    accumulator    0  1  2  3  0  1  2  3  0 ...        up to three remaining registers go to the first

After every 16 registers, each accumulator is added to a sum of its own and reset. At the end each accumulator is added
to its sum, then the four sums to each other in order, and then the 8 lanes one by one. Rows longer than 8192 would need
a second level of such sums. A row of 2048 numbers takes 0.6 us. Before the kernel is used, its bits are compared with
torch's on the same machine (`fastpath/norm.py`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from smoe.kernels.jit import Source, compile_functions

LONGEST = 8192
"""The length of the longest supported row. torch sums longer rows in another order."""
LANES = 16
"""The number of numbers that are multiplied together. It divides the length of every supported row."""


def fits(size: int) -> bool:
    """Return whether the RMSNorm kernel supports rows of `size` numbers."""
    return 0 < size <= LONGEST and size % LANES == 0


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, is_around_zero: bool = False) -> torch.Tensor:
    """Return the RMSNorm of every row of x [..., size], times weight [size], in bf16. Rows are contiguous, and there is
    at least one. `is_around_zero`: multiply by 1 + weight, and round only once."""
    out, size = torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    _functions()[is_around_zero](x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps)
    return out


@functools.cache
def _functions() -> list[Callable[..., None]]:
    """Return the machine code, compiled once per process, as functions f(x, weight, out, rows, size, epsilon): the one
    for usual weights, and the one for weights around zero."""
    pointer, number = ctypes.c_void_p, ctypes.c_longlong
    signature = (pointer, pointer, pointer, number, number, ctypes.c_float)
    return compile_functions(Source(source), {"rms_norm": signature, "rms_norm_around_zero": signature})


def source() -> str:
    """Return the LLVM text of the RMSNorm kernel."""
    from smoe.kernels.norm_code import module_of

    return module_of()
