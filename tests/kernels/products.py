"""Calls of generated products, as `tasks.py` makes them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

ARGUMENTS = (ctypes.c_void_p,) * 4 + (ctypes.c_longlong,) * 3


def multiplied(
    functions: Mapping[Any, Any],
    matrix: int,
    outputs: int,
    x: torch.Tensor,
    begin: int = 0,
    end: int | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs begin ... end - 1 of x [M, K] times the matrix at an address, by the function for M rows: [M, outputs],
    NaN where nothing was written."""
    out = torch.full((len(x), outputs), float("nan"), dtype=torch.bfloat16)
    end, columns = outputs if end is None else end, x.shape[1]
    if len(x) == 1:
        bias_at = None if bias is None else bias.data_ptr()
        functions[1](x.data_ptr(), matrix, out.data_ptr(), bias_at, begin, end, columns)
    else:
        pairs = [pointer for row, to in zip(x, out, strict=True) for pointer in (row.data_ptr(), to.data_ptr())]
        words = (ctypes.c_int64 * len(pairs))(*pairs)
        functions[len(x)](ctypes.addressof(words), matrix, None, None, begin, end, columns)
    return out
