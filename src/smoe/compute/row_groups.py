"""Pads groups of rows to a few sizes, because the library compiles a kernel for every size it meets.

A prompt gives every expert another number of tokens, so most products would first make a kernel (0.2 to 0.5 ms, while
the product of a small expert takes 0.03) and throw another one away. Filled up with zeros to the next of few numbers,
they find theirs. Where the library sums a row in another order with other numbers of rows, as it does on some CPUs,
that would change bits: so it is tried out before the first such group, on data that show it.
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
    """The shape of a matrix [K, N] that rows are multiplied by."""

    columns: int
    """K"""
    outputs: int
    """N"""
    is_transposed: bool
    """Stored as [N, K]."""


class Filling:
    """The products for which filling is allowed: those of matrices of these shapes, on as many threads as are set now.

    It is proven octave by octave, when a number of rows first needs it: every proof leaves the library some kernels,
    25 MiB for all octaves, of which short prompts need few.
    """

    def __init__(self, shapes: Sequence[MatrixShape], dtype: torch.dtype) -> None:
        self.threads = torch.get_num_threads()
        self._shapes = shapes
        self._dtype = dtype
        self._most_rows = _most_rows(shapes)
        self._proven: dict[int, bool] = {}
        """Results by the octave's exponent."""

    def allows(self, rows: int) -> bool:
        """Whether the library's bits of a row are the same with so many rows and with `filled_up(rows)`; False for few
        rows, for matrices that are too large to gain, and on another number of threads."""
        if not _EXACT_ROWS < rows <= self._most_rows or torch.get_num_threads() != self.threads:
            return False
        octave = (rows - 1).bit_length()
        if octave not in self._proven:
            ends = tuple(end for end in ends_of_groups(1 << octave) if end > 1 << (octave - 1))
            self._proven[octave] = all(_is_the_same(shape, ends, self._dtype, self.threads) for shape in self._shapes)
        return self._proven[octave]


def product(x: torch.Tensor, matrix: torch.Tensor, filling: Filling | None) -> torch.Tensor:
    """[n, K] @ [K, N] -> [n, N], with zeros below x where that changes no bit."""
    rows = x.shape[0]
    if filling is None or not filling.allows(rows):
        return x @ matrix
    return (functional.pad(x, (0, 0, 0, filled_up(rows) - rows)) @ matrix)[:rows]


def _most_rows(shapes: Sequence[MatrixShape]) -> int:
    """Up to how many rows a proof for these matrices takes no longer than it may."""
    elements = sum(shape.columns * shape.outputs for shape in shapes)
    most = _MOST_ROWS
    while most > _EXACT_ROWS and 2 * elements * sum(ends_of_groups(most)) > _PROOF_OPERATIONS:
        most //= 2
    return most


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
    """Whether a row's bits are equal for all of these numbers of rows (the last is the largest), on this machine with
    so many threads, which are set: once for all models."""
    x, matrix = telling(shape, numbers[-1], dtype)
    whole = _multiply(x, matrix)
    return all(same_bits(_multiply(x[:rows], matrix), whole[:rows]) for rows in numbers)


def _multiply(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply as the library does, [n, K] @ [K, N]."""
    return x @ matrix
