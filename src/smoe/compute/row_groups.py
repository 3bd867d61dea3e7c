"""Pads groups of rows to a few sizes, because the library compiles a kernel for every size it meets.

A prompt gives every expert another number of tokens, so most products would first make a kernel (0.2 to 0.5 ms, while
the product of a small expert takes 0.03) and throw another one away. Filled up with zeros to the next of few numbers,
they find theirs. Where the library sums a row in another order with other numbers of rows, as it does on some CPUs,
that would change bits: so it is tried out when a model is loaded, on data that show it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from smoe.kernels.proof import same_bits

_EXACT_ROWS = 8
"""So few are not filled up."""
_STEPS = 4
"""Numbers of rows in an octave: a fifth is filled up at most, a tenth on average."""
_MOST_ROWS = 512
_PROOF_OPERATIONS = 20e9
"""Multiplications and additions of a proof at most: a tenth of a second; experts too large for it gain nothing."""


def filled_up(rows: int) -> int:
    """The next of few numbers: 1 to 8, then four in an octave."""
    if rows <= _EXACT_ROWS:
        return rows
    step = (1 << ((rows - 1).bit_length() - 1)) // _STEPS
    return -(-rows // step) * step


class MatrixShape(NamedTuple):
    """Of a matrix [K, N] that rows are multiplied by."""

    columns: int
    """K"""
    outputs: int
    """N"""
    is_transposed: bool
    """Stored as [N, K]."""


class Filling(NamedTuple):
    """For which products it has been proven."""

    most_rows: int
    threads: int


def product(x: torch.Tensor, matrix: torch.Tensor, filling: Filling | None) -> torch.Tensor:
    """[n, K] @ [K, N] -> [n, N], with zeros below x where that is proven."""
    rows = x.shape[0]
    if filling is None or not _EXACT_ROWS < rows <= filling.most_rows or torch.get_num_threads() != filling.threads:
        return x @ matrix
    return (functional.pad(x, (0, 0, 0, filled_up(rows) - rows)) @ matrix)[:rows]


def proven_filling(shapes: Sequence[MatrixShape], dtype: torch.dtype) -> Filling | None:
    """Up to how many rows the library's bits of a row do not depend on their number, for matrices of these shapes.

    Tries the smallest and the largest number that are filled up to each, on as many threads as are set now. None where
    another order shows, and for matrices that are too large to gain.
    """
    elements = sum(shape.columns * shape.outputs for shape in shapes)
    most = _MOST_ROWS
    while most > _EXACT_ROWS and 2 * elements * sum(ends_of_groups(most)) > _PROOF_OPERATIONS:
        most //= 2
    if most == _EXACT_ROWS:
        return None
    ends, threads = tuple(ends_of_groups(most)), torch.get_num_threads()
    is_proven = all(_is_the_same(shape, ends, dtype, threads) for shape in shapes)
    return Filling(most, threads) if is_proven else None


def ends_of_groups(most: int) -> list[int]:
    """The ends of every span of numbers, from 9 to `most`, that are filled up to the same."""
    ends = sorted({filled_up(rows) for rows in range(_EXACT_ROWS + 1, most + 1)})
    return sorted({*ends, *(before + 1 for before in [_EXACT_ROWS, *ends[:-1]])})


def telling(shape: MatrixShape, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, K] and a matrix [K, N] whose product shows in what order it was summed."""
    columns, outputs, is_transposed = shape
    generator = torch.Generator().manual_seed(0)
    # Every term comes twice, once with the other sign: what is left is rounding, and shows the order of the sum
    half = torch.randn(rows, columns // 2, generator=generator)
    half = half * torch.randint(-6, 7, half.shape, generator=generator).exp2()
    weights = torch.randn(outputs, columns // 2, generator=generator)
    x = functional.pad(torch.cat([half, -half], 1), (0, columns % 2)).to(dtype)
    matrix = functional.pad(torch.cat([weights, weights], 1), (0, columns % 2)).to(dtype).t()
    return x, matrix if is_transposed else matrix.contiguous()


@functools.cache
def _is_the_same(shape: MatrixShape, numbers: tuple[int, ...], dtype: torch.dtype, threads: int) -> bool:
    """What the library does on this machine with so many threads, which are set: once for all models."""
    x, matrix = telling(shape, numbers[-1], dtype)
    whole = _multiply(x, matrix)
    return all(same_bits(_multiply(x[:rows], matrix), whole[:rows]) for rows in numbers)


def _multiply(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """As the library does it, [n, K] @ [K, N]."""
    return x @ matrix
