"""Are the bits equal? Our kernels stand in for the library only where they have been found to give its very bits."""

from __future__ import annotations

import torch
from torch.nn import functional

from smoe.bounds import BF16
from smoe.formats.activations import in_8_bits
from smoe.formats.base import Format
from smoe.kernels.matrix import Matrix
from smoe.kernels.row_product import TILE, fits
from smoe.kernels.spinning_pool import Product, SpinningPool
from smoe.kernels.threads import threads

_PROOF_OUTPUTS = 1 << 16
"""A wrong order shows in about one output of 5000, so this many miss it once in half a million times."""
_PROOF_ROWS = 32
"""Products that are compared before the next ones are made."""
_NEAR_OUTPUTS = 1 << 12
_LEEWAY = 1.1
"""Both round the sum to bf16 in the end, which is nearly all of the error, and not always to the same side, ..."""
_OWN_ORDER_LEEWAY = 1.01
"""... which of equal weights, summed in another order, happens only where both sides are equally far."""


def same_bits(ours: torch.Tensor, theirs: object) -> bool:
    """Whether both are tensors of one shape and type with the same numbers; what is no number counts as equal."""
    if not isinstance(theirs, torch.Tensor) or ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        return False
    return torch.equal(ours, theirs) or torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def agrees(pool: SpinningPool, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether the kernel's bits are the library's on this matrix [K, N] and bias [N], on one thread and on all; of a
    pool that multiplies in its own order, whether it is as near to the exact product as the library is."""
    if pool.own_order is not None:
        return _is_near(pool, matrix, bias, 1)
    return _agrees(pool, matrix, bias, 0, {1, torch.get_num_threads()})


def part_that_agrees(pool: SpinningPool, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> int | None:
    """The `part` with which the kernel's bits on this matrix [K, N] and bias [N] are the library's on all threads.

    The library gives each thread a part of the sums of few outputs, so its bits depend on their number. None where no
    part is found. A pool that multiplies in its own order has one part, where it is as near as the library.
    """
    if pool.own_order is not None:
        return 0 if _is_near(pool, matrix, bias, 1) else None
    threads, columns = torch.get_num_threads(), matrix.shape[0]
    parts = [columns] if threads == 1 or columns % (threads * TILE) else [columns, columns // threads]
    return next((part for part in parts if _agrees(pool, matrix, bias, part, {threads})), None)


def agrees_on_rows(pool: SpinningPool, matrix: torch.Tensor, rows: int) -> bool:
    """Whether the kernel's bits of so many rows at once are the library's on this matrix [K, N], on any threads.

    The pool must know how to multiply several. In an order of its own it must be as near as the library.
    """
    if pool.own_order is not None:
        return _is_near(pool, matrix, None, rows)
    columns, outputs = matrix.shape
    generator, ours = torch.Generator().manual_seed(0), torch.empty(rows, outputs, dtype=matrix.dtype)
    for _ in range(-(-_PROOF_OUTPUTS // (rows * outputs))):
        x = torch.randn(rows, columns, generator=generator).to(matrix.dtype)
        pool.multiply_rows(x, matrix, ours)
        for count in {1, torch.get_num_threads()}:
            with threads(count):
                if not same_bits(ours, x @ matrix):
                    return False
    return True


def is_as_near(pool: SpinningPool, matrix: Matrix, form: Format, rows: torch.Tensor) -> bool:
    """Whether our product with a quantised matrix, or with its `rows`, the first bytes [n, bytes], is no
    further from the exact one than torch's bf16 product on the dequantised weights, on average.

    Where it rounds activations, the exact one is that of the rounded ones, and ours no further from it than a result
    must be that is rounded to bf16: else a wrong kernel would hide behind what is lost on purpose.
    """
    assert matrix.products is not None
    outputs, numbers = rows.shape[0], torch.from_numpy(form.decode(rows.numpy()))
    x = torch.randn(1, matrix.columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours = torch.empty(1, outputs, dtype=torch.bfloat16)
    pool.multiply_quantised(x, [matrix._replace(outputs=outputs)], ours)
    if matrix.products.activations == BF16:
        return is_no_further(ours, x @ numbers.bfloat16().T, x.double() @ numbers.double().T)
    exact = torch.from_numpy(in_8_bits(form, x.float().numpy())) @ numbers.double().T
    return is_no_further(ours, exact.bfloat16(), exact)


def _is_near(pool: SpinningPool, matrix: torch.Tensor, bias: torch.Tensor | None, rows: int) -> bool:
    """Whether our product of so many rows with a matrix [K, N] is no further from the exact one than the library's."""
    if not _fits(matrix, bias):
        return False
    columns, outputs = matrix.shape
    some = slice(min(outputs, _NEAR_OUTPUTS))
    matrix, bias = matrix[:, some], None if bias is None else bias[some]
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(matrix.dtype)
    ours = x.new_empty(rows, matrix.shape[1])
    if rows == 1:
        pool.multiply([Product(x, matrix, ours, bias)])
    else:
        pool.multiply_rows(x, matrix, ours)
    exact = x.double() @ matrix.double()
    theirs = functional.linear(x, matrix.t(), bias)
    return is_no_further(ours, theirs, exact if bias is None else exact + bias, _OWN_ORDER_LEEWAY)


def is_no_further(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, leeway: float = _LEEWAY) -> bool:
    """Whether our error is no larger than theirs, on average."""
    error, bound = ((each.double() - exact).square().mean() for each in (ours, theirs))
    return bool(error <= leeway * bound)


def _agrees(pool: SpinningPool, matrix: torch.Tensor, bias: torch.Tensor | None, part: int, counts: set[int]) -> bool:
    if not _fits(matrix, bias):
        return False
    columns, outputs = matrix.shape
    generator, left = torch.Generator().manual_seed(0), -(-_PROOF_OUTPUTS // outputs)
    while left > 0:
        rows = torch.randn(min(left, _PROOF_ROWS), columns, generator=generator).to(matrix.dtype).split(1)
        products = [Product(x, matrix, x.new_empty(1, outputs), bias, part) for x in rows]
        pool.multiply(products)
        for count in counts:
            with threads(count):  # row by row: several at once the library may sum in another order
                if not all(same_bits(each.out, functional.linear(each.x, matrix.t(), bias)) for each in products):
                    return False
        left -= len(rows)
    return True


def _fits(matrix: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return fits(matrix) and (bias is None or (bias.dtype is matrix.dtype and bias.is_contiguous()))
