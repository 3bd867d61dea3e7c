"""Compares our kernels with torch when a model is loaded. A kernel is used only if it has torch's bits, or if it is as
accurate as torch."""

from __future__ import annotations

import torch
from torch.nn import functional

from smoe.bounds import BF16
from smoe.formats.activations import in_8_bits
from smoe.formats.base import Format
from smoe.kernels.many_rows import fits as fits_many
from smoe.kernels.matrix import Matrix
from smoe.kernels.row_product import TILE, fits
from smoe.kernels.spinning_pool import Product, SpinningPool
from smoe.kernels.threads import threads

_PROOF_OUTPUTS = 1 << 16
"""The number of outputs to compare. A wrong order of sums changes about one output in 5000, so a test fails to notice
it once in half a million times."""
_PROOF_ROWS = 32
"""The number of rows that are multiplied and compared at a time."""
_NEAR_OUTPUTS = 1 << 12
_MANY_OUTPUTS = 256
"""The largest number of outputs that are compared for many rows, for which torch may need a hundred times as long."""
_LEEWAY = 1.1
"""The largest allowed error relative to torch's. Both results are rounded to bf16 at the end. This rounding dominates
the errors, and its direction may differ."""
_OWN_ORDER_LEEWAY = 1.01
"""The largest allowed error of our own order of sums relative to torch's. Both multiply the same weights, so the final
rounding differs only for sums near ties."""


def same_bits(ours: torch.Tensor, theirs: object) -> bool:
    """Return whether `ours` and `theirs` are tensors of the same shape and dtype with equal values, where NaN equals
    NaN."""
    if not isinstance(theirs, torch.Tensor) or ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        return False
    return torch.equal(ours, theirs) or torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def agrees(pool: SpinningPool, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether the pool's product with this matrix [K, N] and bias [N] may replace torch's.

    It must have torch's bits on one thread and on all. For a pool with its own order of sums, its error must be no
    larger than torch's.
    """
    if pool.own_order is not None:
        return _is_near(pool, matrix, bias, 1)
    return _agrees(pool, matrix, bias, 0, {1, torch.get_num_threads()})


def part_that_agrees(pool: SpinningPool, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> int | None:
    """Return the length of partial sums (`Product.part`) with which the kernel has torch's bits for this matrix [K, N]
    and bias [N] on all threads. Return None if no length gives torch's bits.

    torch divides sums among threads if there are few outputs, so its bits depend on the number of threads;
    `Product.part` is the length of each thread's share of a sum. For a pool with its own order of sums, return 0 if its
    error is no larger than torch's.
    """
    if pool.own_order is not None:
        return 0 if _is_near(pool, matrix, bias, 1) else None
    threads, columns = torch.get_num_threads(), matrix.shape[0]
    parts = [columns] if threads == 1 or columns % (threads * TILE) else [columns, columns // threads]
    return next((part for part in parts if _agrees(pool, matrix, bias, part, {threads})), None)


def agrees_on_rows(pool: SpinningPool, matrix: torch.Tensor, rows: int) -> bool:
    """Return whether the pool's product of `rows` rows with this matrix [K, N] may replace torch's, on any number of
    threads.

    The pool must support several rows. A pool with its own order is compared by its error, as in `agrees`.
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


def agrees_on_many_rows(pool: SpinningPool, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether the pool's product of many rows with this matrix [K, N] and bias [N], if it has one, may replace
    torch's: whether its error is no larger."""
    many = pool.many
    if many is None:
        return True
    if not fits_many(matrix, bias):
        return False
    some = slice(min(matrix.shape[1], _MANY_OUTPUTS))
    matrix, bias = matrix[:, some], None if bias is None else bias[some]
    for rows in (many.isa.lanes, 5 * many.isa.lanes - 1):  # panels of one, two and three registers
        x = torch.randn(rows, matrix.shape[0], generator=torch.Generator().manual_seed(0)).to(matrix.dtype)
        ours = x.new_empty(rows, matrix.shape[1])
        many.multiply(x, matrix, ours, bias)
        exact = x.double() @ matrix.double()
        theirs = functional.linear(x, matrix.t(), bias)
        if not is_no_further(ours, theirs, exact if bias is None else exact + bias, _OWN_ORDER_LEEWAY):
            return False
    return True


def is_as_near(pool: SpinningPool, matrix: Matrix, form: Format, rows: torch.Tensor) -> bool:
    """Return whether our product with a quantized matrix is, on average, at least as accurate as torch's with
    dequantized weights.

    `rows`: the first rows of the matrix as bytes [n, bytes]. If activations are rounded to 8 bits, the reference uses
    the rounded ones, and our error must be that of rounding to bf16. Otherwise the rounding of activations would hide a
    wrong kernel.
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
    """Return whether our product of `rows` activation rows with a matrix [K, N] has an error no larger than torch's."""
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
    """Return whether the mean square error of our result is at most `leeway` times that of `theirs`, torch's result."""
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
            with threads(count):  # row by row, because for several rows torch may sum in another order
                if not all(same_bits(each.out, functional.linear(each.x, matrix.t(), bias)) for each in products):
                    return False
        left -= len(rows)
    return True


def _fits(matrix: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return fits(matrix) and (bias is None or (bias.dtype is matrix.dtype and bias.is_contiguous()))
