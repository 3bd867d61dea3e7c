"""A matrix as machine code sees it: its address, its shape, and the functions that multiply it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from smoe.bounds import BF16, INT8
from smoe.formats.activations import fits as activations_fit
from smoe.formats.base import Format
from smoe.formats.interleaved import interleaved, words_of
from smoe.kernels import jit
from smoe.kernels.byte_layout import Layout
from smoe.kernels.isa import Isa, cpu_prefetches_rows, widest
from smoe.kernels.jit import Source, address_of, compile_functions

if TYPE_CHECKING:
    import torch

_ARGUMENTS = (ctypes.c_void_p,) * 4 + (ctypes.c_longlong,) * 3
_ROWS = (1, 2, 4)


class ByteFunctions(NamedTuple):
    """The addresses of machine code for products with rows in 8 bits (`byte_rows.py`, `byte_products.py`)."""

    layout: Layout
    """The layout of rows that `rows` and `gated_rows` write and `products` reads."""
    rows: int
    gated_rows: int
    products: int
    interleave: int | None = None
    """The function that interleaves the rows of a matrix in memory; None if the format's rows are as in the file."""


class Products(NamedTuple):
    """The machine code that multiplies matrices of one format."""

    of_rows: tuple[int, ...]
    """The addresses of the functions for one, two and four rows. Empty if rows are rounded to 8 bits (`in_bytes`)."""
    unpack: int | None
    """The address of the function that dequantizes rows to bf16; None for bf16 matrices and interleaved rows."""
    in_bytes: ByteFunctions | None = None
    """The functions for rows in 8 bits (`EngineConfig.activations`); None if rows stay in bf16."""

    @property
    def activations(self) -> str:
        """The type to which rows of x are rounded before they are multiplied."""
        return BF16 if self.in_bytes is None else INT8


class Matrix(NamedTuple):
    """A weight matrix [outputs, columns], stored row by row or in interleaved rows, as machine code takes it."""

    address: int
    outputs: int
    columns: int
    products: Products | None = None
    """The functions for the matrix's format. None for a bf16 matrix, which the pool multiplies in torch's order or in
    its own."""


def in_bf16(*matrices: torch.Tensor) -> tuple[Matrix, ...]:
    """Return bf16 matrices [K, N], each contiguous along K, as `Matrix` objects for machine code. The tensors must
    outlive the result."""
    return tuple(Matrix(each.data_ptr(), each.shape[1], each.shape[0]) for each in matrices)


@functools.cache
def products_of(form: Format, activations: str = BF16) -> Products | None:
    """Return the machine code for a format on this CPU, compiled once per process. None if the format is not
    supported."""
    isa = widest(activations)
    return None if isa is None else _compiled(form, isa, activations)


def in_memory(form: Format, outputs: int, activations: str) -> Format:
    """Return the format in which our kernels multiply a matrix of the format `form` fastest: with interleaved rows
    where this CPU gains from them."""
    isa = widest(activations)
    if isa is None or not isa.interleaves or activations != INT8 or outputs % isa.lanes:
        return form
    return interleaved(form, isa.lanes) if activations_fit(form) and words_of(form) is not None else form


def interleave(form: Format, matrix: Matrix) -> None:
    """Interleave the rows of a matrix that is stored as in the file. `form`: the interleaved format."""
    assert matrix.products is not None and matrix.products.in_bytes is not None, form.name
    assert matrix.products.in_bytes.interleave is not None, form.name
    run = ctypes.CFUNCTYPE(None, *_ARGUMENTS)(matrix.products.in_bytes.interleave)
    run(0, matrix.address, 0, 0, 0, matrix.outputs, matrix.columns)


@functools.cache
def own_order() -> Products | None:
    """Return the machine code that multiplies bf16 matrices in our own order of sums, compiled once per process. None
    if this CPU is not supported."""
    isa = widest()
    if isa is None:
        return None
    from smoe.kernels import own_order

    source = Source(own_order.module_of, (isa, not cpu_prefetches_rows()))
    one, two, four = _addresses(source, [own_order.products_name(rows) for rows in _ROWS])
    return Products((one, two, four), None)


@functools.cache
def added_rows(activations: str) -> int:
    """Return the address of the function that adds weighted rows to totals (`added_rows.py`)."""
    isa = widest(activations)
    assert isa is not None, activations
    from smoe.kernels import added_rows as rows

    (address,) = _addresses(Source(rows.module_of, (isa,)), [rows.NAME])
    return address


def compile_ahead(forms: Iterable[Format], activations: str) -> None:
    """Begin to compile the machine code of these formats, which `products_of` will return, in another process.
    `activations`: the type to which rows of activations will be rounded."""
    isa, plain = widest(activations), widest()
    if isa is None or plain is None:
        return
    different = list(dict.fromkeys(forms))
    layouts = dict.fromkeys([*different, *(in_memory(form, 0, activations) for form in different)])
    sources = [_source_of(form, isa, activations) for form in layouts]
    jit.compile_ahead([*sources, *(_source_of(form, plain, BF16) for form in different)])


def _source_of(form: Format, isa: Isa, activations: str) -> Source:
    """Return the source of a format's products."""
    from smoe.kernels import quantised  # requires llvmlite, which is optional

    if activations == INT8 and activations_fit(form):
        return Source(quantised.byte_module_of, (form, isa))
    return Source(quantised.module_of, ((form,), isa))


def _compiled(form: Format, isa: Isa, activations: str) -> Products:
    from smoe.kernels import quantised  # requires llvmlite, which is optional

    source = _source_of(form, isa, activations)
    if activations == INT8 and activations_fit(form):
        layout = Layout.of(form)
        rows, gated_rows, products, last = _addresses(source, quantised.byte_names(form))
        if form.rows > 1:
            return Products((), None, ByteFunctions(layout, rows, gated_rows, products, last))
        return Products((), last, ByteFunctions(layout, rows, gated_rows, products))
    names = [*(quantised.products_name(form, rows) for rows in _ROWS), quantised.unpack_name(form)]
    one, two, four, unpack = _addresses(source, names)
    return Products((one, two, four), unpack)


def _addresses(source: Source, names: Sequence[str]) -> list[int]:
    return [address_of(each) for each in compile_functions(source, dict.fromkeys(names, _ARGUMENTS))]
