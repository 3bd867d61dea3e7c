"""A matrix as machine code knows it: where it lies, its shape, and what multiplies it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from smoe.config import BF16
from smoe.formats.base import Format
from smoe.kernels.isa import Isa, widest
from smoe.kernels.jit import address_of, compile_functions

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_longlong


class Products(NamedTuple):
    """Machine code for a quantised format."""

    of_rows: tuple[int, int, int]
    """Addresses of the products with one, two and four rows."""
    unpack: int
    """Address of what writes rows of the matrix as bf16."""
    activations: str = BF16
    """What a row of x is multiplied as (`EngineConfig.activations`)."""


class Matrix(NamedTuple):
    """Weights [outputs, columns], row by row."""

    address: int
    outputs: int
    columns: int
    products: Products | None = None
    """None: bf16 numbers, which `row_product.py` multiplies."""


def in_bf16(*matrices: torch.Tensor) -> tuple[Matrix, ...]:
    """Matrices [K, N] whose rows lie in memory along K; the tensors must outlive the answer."""
    return tuple(Matrix(each.data_ptr(), each.shape[1], each.shape[0]) for each in matrices)


@functools.cache
def products_of(form: Format, activations: str = BF16) -> Products | None:
    """Machine code for a format on this CPU, made once a process; None where there is none for it."""
    isa = widest(activations)
    return None if isa is None else _compiled(form, isa, activations)


def _compiled(form: Format, isa: Isa, activations: str) -> Products:
    from smoe.kernels import quantised  # needs llvmlite, which not every machine has

    arguments = (_POINTER,) * 4 + (_NUMBER,) * 3
    names = [*(quantised.products_name(form, rows) for rows in (1, 2, 4)), quantised.unpack_name(form)]
    functions: list[Callable[..., None]] = compile_functions(
        quantised.module_of([form], isa, activations), dict.fromkeys(names, arguments)
    )
    one, two, four, unpack = map(address_of, functions)
    return Products((one, two, four), unpack, activations)
