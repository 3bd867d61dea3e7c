"""A matrix as machine code knows it: where it lies, its shape, and what multiplies it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from smoe.bounds import BF16, INT8
from smoe.formats.activations import fits as activations_fit
from smoe.formats.base import Format
from smoe.kernels.byte_layout import Layout
from smoe.kernels.isa import Isa, widest
from smoe.kernels.jit import Source, address_of, compile_functions

if TYPE_CHECKING:
    import torch

_ARGUMENTS = (ctypes.c_void_p,) * 4 + (ctypes.c_longlong,) * 3
_ROWS = (1, 2, 4)


class ByteFunctions(NamedTuple):
    """Machine code that multiplies rows in 8 bits: addresses (`byte_rows.py`, `byte_products.py`)."""

    layout: Layout
    """Of the rows that `products` takes."""
    rows: int
    gated_rows: int
    products: int


class Products(NamedTuple):
    """Machine code for matrices of one format."""

    of_rows: tuple[int, ...]
    """Addresses of the products with one, two and four rows; none where rows are multiplied `in_bytes`."""
    unpack: int | None
    """Address of what writes rows of the matrix as bf16; None for those that are."""
    in_bytes: ByteFunctions | None = None
    """What multiplies rows that are rounded to 8 bits (`EngineConfig.activations`)."""

    @property
    def activations(self) -> str:
        """What a row of x is multiplied as."""
        return BF16 if self.in_bytes is None else INT8


class Matrix(NamedTuple):
    """Weights [outputs, columns], row by row."""

    address: int
    outputs: int
    columns: int
    products: Products | None = None
    """None: bf16 numbers, for which the pool chooses: in the library's order or its own."""


def in_bf16(*matrices: torch.Tensor) -> tuple[Matrix, ...]:
    """Matrices [K, N] whose rows lie in memory along K; the tensors must outlive the answer."""
    return tuple(Matrix(each.data_ptr(), each.shape[1], each.shape[0]) for each in matrices)


@functools.cache
def products_of(form: Format, activations: str = BF16) -> Products | None:
    """Machine code for a format on this CPU, made once a process; None where there is none for it."""
    isa = widest(activations)
    return None if isa is None else _compiled(form, isa, activations)


@functools.cache
def own_order() -> Products | None:
    """Machine code for bf16 numbers in an order of sums of our own, likewise."""
    isa = widest()
    if isa is None:
        return None
    from smoe.kernels import own_order

    one, two, four = _addresses(Source(own_order.module_of, (isa,)), [own_order.products_name(rows) for rows in _ROWS])
    return Products((one, two, four), None)


@functools.cache
def added_rows(activations: str) -> int:
    """The address of the function that adds rows to totals (`added_rows.py`), where there is one for products."""
    isa = widest(activations)
    assert isa is not None, activations
    from smoe.kernels import added_rows as rows

    (address,) = _addresses(Source(rows.module_of, (isa,)), [rows.NAME])
    return address


def _compiled(form: Format, isa: Isa, activations: str) -> Products:
    from smoe.kernels import quantised  # needs llvmlite, which not every machine has

    if activations == INT8 and activations_fit(form):
        layout = Layout.of(form)
        names = [*quantised.byte_names(form), quantised.unpack_name(form)]
        rows, gated_rows, products, unpack = _addresses(Source(quantised.byte_module_of, (form, isa)), names)
        return Products((), unpack, ByteFunctions(layout, rows, gated_rows, products))
    names = [*(quantised.products_name(form, rows) for rows in _ROWS), quantised.unpack_name(form)]
    one, two, four, unpack = _addresses(Source(quantised.module_of, ((form,), isa)), names)
    return Products((one, two, four), unpack)


def _addresses(source: Source, names: Sequence[str]) -> list[int]:
    return [address_of(each) for each in compile_functions(source, dict.fromkeys(names, _ARGUMENTS))]
