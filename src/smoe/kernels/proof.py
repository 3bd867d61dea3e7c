"""Are the bits equal? Our kernels stand in for the library only where they have been found to give its very bits."""

from __future__ import annotations

import torch
from torch.nn import functional

from smoe.config import BF16
from smoe.formats.activations import in_8_bits
from smoe.formats.base import Format
from smoe.kernels.matrix import Matrix
from smoe.kernels.row_product import TILE, fits
from smoe.kernels.spinning_pool import Product, SpinningPool
from smoe.kernels.threads import threads

_PROOF_OUTPUTS = 1 << 16
"""A wrong order shows in about one output of 5000, so this many miss it once in half a million times."""


def same_bits(ours: torch.Tensor, theirs: object) -> bool:
    """Whether both are tensors of one shape and type with the same numbers; what is no number counts as equal."""
    if not isinstance(theirs, torch.Tensor) or ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        return False
    return torch.equal(ours, theirs) or torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def agrees(pool: SpinningPool, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether the kernel's bits are the library's on this matrix [K, N] and bias [N], on one thread and on all."""
    return _agrees(pool, matrix, bias, 0, {1, torch.get_num_threads()})


def part_that_agrees(pool: SpinningPool, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> int | None:
    """The `part` with which the kernel's bits on this matrix [K, N] and bias [N] are the library's on all threads.

    The library gives each thread a part of the sums of few outputs, so its bits depend on their number. None where no
    part is found.
    """
    threads, columns = torch.get_num_threads(), matrix.shape[0]
    parts = [columns] if threads == 1 or columns % (threads * TILE) else [columns, columns // threads]
    return next((part for part in parts if _agrees(pool, matrix, bias, part, {threads})), None)


def agrees_on_rows(pool: SpinningPool, matrix: torch.Tensor, rows: int) -> bool:
    """Whether the kernel's bits of so many rows at once are the library's on this matrix [K, N], on any threads.

    The pool must know how to multiply several.
    """
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
        exact, theirs = x.double() @ numbers.double().T, x @ numbers.bfloat16().T
    else:
        exact = torch.from_numpy(in_8_bits(form, x.float().numpy())) @ numbers.double().T
        theirs = exact.bfloat16()
    error, bound = ((each.double() - exact).square().mean() for each in (ours, theirs))
    return bool(error <= 1.1 * bound)  # where every weight is a bf16 number both round alike


def _agrees(pool: SpinningPool, matrix: torch.Tensor, bias: torch.Tensor | None, part: int, counts: set[int]) -> bool:
    if not fits(matrix) or (bias is not None and not (bias.dtype is matrix.dtype and bias.is_contiguous())):
        return False
    columns, rows = matrix.shape
    generator, ours = torch.Generator().manual_seed(0), torch.empty(1, rows, dtype=matrix.dtype)
    for _ in range(-(-_PROOF_OUTPUTS // rows)):
        x = torch.randn(1, columns, generator=generator).to(matrix.dtype)
        pool.multiply([Product(x, matrix, ours, bias, part)])
        for count in counts:
            with threads(count):
                if not same_bits(ours, functional.linear(x, matrix.t(), bias)):
                    return False
    return True
