"""Generated products of quantised formats, called one function at a time."""

from __future__ import annotations

import ctypes
import functools

import torch

from smoe.config import BF16
from smoe.formats.base import Format
from smoe.kernels.isa import Isa
from smoe.kernels.jit import compile_functions

_ARGUMENTS = (ctypes.c_void_p,) * 4 + (ctypes.c_longlong,) * 3


@functools.cache
def compiled(form: Format, isa: Isa, activations: str = BF16) -> dict[object, object]:
    """By the number of rows of x; "unpack"."""
    from smoe.kernels.quantised import module_of, products_name, unpack_name  # needs llvmlite

    names = {rows: products_name(form, rows) for rows in (1, 2, 4)} | {"unpack": unpack_name(form)}
    made = compile_functions(module_of([form], isa, activations), dict.fromkeys(names.values(), _ARGUMENTS))
    return dict(zip(names, made, strict=True))


def columns_of(form: Format, blocks: int) -> int:
    return form.numbers * blocks


def multiplied(functions, data, x: torch.Tensor, columns: int, begin: int, end: int, bias=None) -> torch.Tensor:
    """Outputs begin ... end - 1 of every row of x, NaN elsewhere."""
    out = torch.full((len(x), len(data)), float("nan"), dtype=torch.bfloat16)
    address = data.ctypes.data
    if len(x) == 1:
        bias_at = None if bias is None else bias.data_ptr()
        functions[1](x.data_ptr(), address, out.data_ptr(), bias_at, begin, end, columns)
    else:
        pairs = [pointer for row, to in zip(x, out, strict=True) for pointer in (row.data_ptr(), to.data_ptr())]
        words = (ctypes.c_int64 * len(pairs))(*pairs)
        functions[len(x)](ctypes.addressof(words), address, None, None, begin, end, columns)
    return out


def exact(form: Format, data, x: torch.Tensor) -> torch.Tensor:
    """In float64, on the numbers that the codes stand for."""
    return x.double() @ torch.from_numpy(form.decode(data)).double().T
