"""Finds up to how many rows our kernel has torch's bits, for workers without torch.

torch may sum a row in another order when it multiplies many rows at once. On CPUs with AVX-512 BF16 no such case was
found (docs/log/kernels.md), and our kernel for several rows has the same order; but torch does not document it, so it
is tested.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smoe.compute.row_groups import MatrixShape, ends_of_groups, telling
from smoe.kernels.proof import same_bits
from smoe.kernels.row_product import fits_shape
from smoe.kernels.spinning_pool import Product, SpinningPool

MOST_ROWS = 2048
"""The largest number of rows that are sent at once with default settings."""
_FEW_ROWS = 8
_MOST_OUTPUTS = 4096
"""The number of outputs that are compared of a larger matrix; to compare all of them would take a gigabyte."""
_PROOF_OPERATIONS = 60e9
"""The largest number of operations of a test, which take about a second. For larger experts, fewer rows are tested."""


def kernel_rows(pool: SpinningPool, shapes: Sequence[MatrixShape]) -> int:
    """Return the largest number of rows for which products with bf16 matrices of all these shapes have torch's bits; 0
    if no number does.

    The result holds for the current number of threads. `pool` must support several rows in torch's order of sums.
    """
    if any(not shape.is_transposed or not fits_shape(shape.columns, shape.outputs) for shape in shapes):
        return 0
    shapes = [shape._replace(outputs=min(shape.outputs, _MOST_OUTPUTS)) for shape in shapes]
    elements = sum(shape.columns * shape.outputs for shape in shapes)
    most = MOST_ROWS
    while most > _FEW_ROWS and 2 * elements * sum(_numbers(most)) > _PROOF_OPERATIONS:
        most //= 2
    proven = 0
    data = [telling(shape, most, torch.bfloat16) for shape in shapes]
    for rows in _numbers(most):
        if not all(_agrees(pool, x[:rows], matrix) for x, matrix in data):
            break
        proven = rows
    return proven


def _numbers(most: int) -> list[int]:
    return [*range(1, _FEW_ROWS + 1), *(ends_of_groups(most) if most > _FEW_ROWS else [])]


def _agrees(pool: SpinningPool, x: torch.Tensor, matrix: torch.Tensor) -> bool:
    ours = x.new_empty(x.shape[0], matrix.shape[1])
    if x.shape[0] == 1:
        pool.multiply([Product(x, matrix, ours)])
    else:
        pool.multiply_rows(x, matrix, ours)
    return same_bits(ours, x @ matrix)
