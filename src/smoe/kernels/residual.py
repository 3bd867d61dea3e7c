"""What a decoder layer computes between the products of a prompt's tokens: residual sums and norms, on all threads.

    normed   = norm(x)
    after    = x + y,  normed = norm(after)
    out      = x + totals        totals are rounded to bf16 first

Every step rounds as torch's separate operations do. Those take one thread each, and after products, which empty the
caches, some 0.05 ms in Python (docs/log/kernels.md).
"""

from __future__ import annotations

import ctypes
import functools

import torch

from smoe.kernels.jit import Source, address_of, compile_functions
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.token_attention import Norm, bits_of

_STEP = 4
"""The number of rows that a thread takes at a time: some 5 us."""
_WAKING_ROWS = 64
"""The number of rows below which one thread is faster than waking others that sleep."""


def normed(pool: SpinningPool, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the norm of x [..., H], contiguous and in bf16."""
    out = torch.empty_like(x)
    _run(pool, x, (0, 0, x.data_ptr()), norm, out)
    return out


def added_and_normed(
    pool: SpinningPool, x: torch.Tensor, y: torch.Tensor, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + y and its norm, both [..., H], for x and y [..., H], contiguous and in bf16."""
    after, out = torch.empty_like(x), torch.empty_like(x)
    _run(pool, x, (y.data_ptr(), 0, after.data_ptr()), norm, out)
    return after, out


def added(pool: SpinningPool, x: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Return x + totals, with totals rounded to bf16. x [..., H] is contiguous and in bf16; totals are as many numbers
    in float32, contiguous."""
    out = torch.empty_like(x)
    _run(pool, x, (0, totals.data_ptr(), out.data_ptr()), None, None)
    return out


def _run(
    pool: SpinningPool, x: torch.Tensor, places: tuple[int, int, int], norm: Norm | None, out: torch.Tensor | None
) -> None:
    """Compute all rows. `places`: the addresses of y, of totals and of the sum."""
    size = x.shape[-1]
    rows = x.numel() // size
    of_norm = (0, 0) if norm is None or out is None else (norm.at(), out.data_ptr())
    eps = 0 if norm is None else bits_of(norm.eps)
    arguments = (x.data_ptr(), *places, *of_norm, rows, size, _STEP, eps)
    pool.share(_function(), arguments, -(-rows // _STEP), rows >= _WAKING_ROWS)


@functools.cache
def _function() -> int:
    """Return the address of the machine code, compiled once per process."""
    from smoe.kernels import residual_code  # requires llvmlite, which is optional

    signature = (ctypes.c_void_p, ctypes.c_longlong)
    (function,) = compile_functions(Source(residual_code.module_of), {residual_code.NAME: signature})
    return address_of(function)
