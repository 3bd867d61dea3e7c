"""Generated products, called one function at a time, as `tasks.py` makes its calls."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from smoe.bounds import BF16
from smoe.formats.base import Bytes, Format
from smoe.kernels import matrix
from smoe.kernels.byte_layout import Layout
from smoe.kernels.isa import Isa, widest
from smoe.kernels.jit import Source, compile_functions
from smoe.kernels.spinning_pool import RowLists

ARGUMENTS = (ctypes.c_void_p,) * 4 + (ctypes.c_longlong,) * 3
Functions = Mapping[Any, Any]
"""By the number of rows of x; "unpack"."""


@functools.cache
def compiled(form: Format, isa: Isa) -> Functions:
    from smoe.kernels.quantised import module_of, products_name, unpack_name  # needs llvmlite

    names: dict[Any, str] = {rows: products_name(form, rows) for rows in (1, 2, 4)} | {"unpack": unpack_name(form)}
    made = compile_functions(Source(module_of, ((form,), isa)), dict.fromkeys(names.values(), ARGUMENTS))
    return dict(zip(names, made, strict=True))


@functools.cache
def compiled_in_bytes(form: Format, isa: Isa) -> Functions:
    """What makes rows in 8 bits, what makes gated ones, the products with them, and what unpacks or interleaves."""
    from smoe.kernels.quantised import byte_module_of, byte_names  # needs llvmlite

    names = byte_names(form)
    made = compile_functions(Source(byte_module_of, (form, isa)), dict.fromkeys(names, ARGUMENTS))
    last = "interleave" if form.rows > 1 else "unpack"
    return dict(zip(("rows", "gated_rows", "products", last), made, strict=True))


def gains_by_interleaving(patch: pytest.MonkeyPatch, can_gain: bool = True) -> None:
    """From now on rows of matrices are interleaved in memory, as on CPUs whose products gain from it, or are not."""

    def found(activations: str = BF16) -> Isa | None:
        isa = widest(activations)
        return None if isa is None else dataclasses.replace(isa, interleaves=can_gain)

    patch.setattr(matrix, "widest", found)


def columns_of(form: Format, blocks: int) -> int:
    return form.numbers * blocks


def multiplied(
    functions: Functions,
    data: Bytes,
    x: torch.Tensor,
    columns: int,
    begin: int,
    end: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs begin ... end - 1 of every row of x [M, K] times a quantised matrix: [M, outputs], NaN elsewhere."""
    assert x.shape[1] == columns
    return multiplied_at(functions, data.ctypes.data, len(data), x, begin, end, bias)


def multiplied_at(
    functions: Functions,
    matrix: int,
    outputs: int,
    x: torch.Tensor,
    begin: int = 0,
    end: int | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same of the matrix at an address."""
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


def exact(form: Format, data: Bytes, x: torch.Tensor) -> torch.Tensor:
    """In float64, on the numbers that the codes stand for."""
    return x.double() @ numbers_of(form, data).T


def numbers_of(form: Format, data: Bytes) -> torch.Tensor:
    """The numbers that codes stand for, in float64: [rows, columns]."""
    return _decoded(form, len(data), data.tobytes())


@functools.lru_cache(maxsize=64)
def _decoded(form: Format, rows: int, content: bytes) -> torch.Tensor:
    """The reference decoder is slow, and the tests of every instruction set decode the same matrices."""
    return torch.from_numpy(form.decode(np.frombuffer(content, np.uint8).reshape(rows, -1))).double()


def multiplied_in_bytes(
    form: Format,
    functions: Functions,
    data: Bytes,
    x: torch.Tensor,
    begin: int = 0,
    end: int | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs begin ... end - 1 of every row of x [M, K], rounded to 8 bits: [M, outputs], NaN elsewhere."""
    rows, columns = x.shape
    bytes_ = torch.zeros(rows, Layout.of(form).nbytes(columns), dtype=torch.uint8)
    functions["rows"](x.data_ptr(), None, bytes_.data_ptr(), None, 0, rows, columns)
    return _products_in_bytes(functions, data, bytes_, columns, begin, end, bias)


def gated_in_bytes(
    form: Format, functions: Functions, data: Bytes, wide: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """All outputs of table[gate] * up of every row of wide [M, 2I], rounded to 8 bits: [M, outputs]."""
    rows, columns = wide.shape[0], wide.shape[1] // 2
    bytes_ = torch.zeros(rows, Layout.of(form).nbytes(columns), dtype=torch.uint8)
    functions["gated_rows"](wide.data_ptr(), table.data_ptr(), bytes_.data_ptr(), None, 0, rows, columns)
    return _products_in_bytes(functions, data, bytes_, columns)


def _products_in_bytes(
    functions: Functions,
    data: Bytes,
    bytes_: torch.Tensor,
    columns: int,
    begin: int = 0,
    end: int | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.full((len(bytes_), len(data)), float("nan"), dtype=torch.bfloat16)
    lists = RowLists()
    lists.begin(1 + 2 * len(out))
    given = lists.add([row.data_ptr() for row in bytes_], [to.data_ptr() for to in out])
    bias_at = None if bias is None else bias.data_ptr()
    end = len(data) if end is None else end
    functions["products"](given, data.ctypes.data, None, bias_at, begin, end, columns)
    return out
