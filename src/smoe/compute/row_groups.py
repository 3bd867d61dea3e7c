"""Pads the rows of an expert to one of a few sizes, because the library behind torch's products compiles a kernel for
every new size.

A prompt routes another number of tokens to every expert. So most products would first compile a kernel (0.2 to 0.5 ms,
while a small expert's product takes 0.03 ms) and evict another kernel from the library's cache. Rows that are padded
with zeros to one of few sizes find a compiled kernel. On some CPUs the order of sums depends on the number of rows, so
that padding would change bits. This is tested, with data that reveal it, before rows are first padded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from smoe.kernels.proof import same_bits

_EXACT_ROWS = 8
"""The largest number of rows that is not padded."""
_STEPS = 4
"""The number of sizes between one power of two and the next: at most a fifth of the rows are padding, a tenth on
average."""
_MOST_ROWS = 512
_PROOF_OPERATIONS = 20e9
"""The largest number of operations of a test, which take a tenth of a second. Larger experts would not become faster by
padding."""


def filled_up(rows: int) -> int:
    """Return the number of rows after padding. Numbers from 1 to 8 stay the same; above, there are four sizes between a
    power of two and the next."""
    if rows <= _EXACT_ROWS:
        return rows
    step = (1 << ((rows - 1).bit_length() - 1)) // _STEPS
    return -(-rows // step) * step


class MatrixShape(NamedTuple):
    """The shape of a matrix [K, N] by which rows [n, K] are multiplied."""

    columns: int
    """K, the length of an input row."""
    outputs: int
    """N, the number of outputs."""
    is_transposed: bool
    """Whether the matrix is stored as [N, K]."""


class Filling:
    """Decides which numbers of rows may be padded, for products with matrices of these shapes on the current number of
    threads.

    Each range from one power of two to the next is tested when a number of rows first falls into it, because every test
    leaves compiled kernels in memory: 25 MiB for all ranges.
    """

    def __init__(self, shapes: Sequence[MatrixShape], dtype: torch.dtype) -> None:
        self.threads = torch.get_num_threads()
        self._shapes = shapes
        self._dtype = dtype
        self._most_rows = _most_rows(shapes)
        self._proven: dict[int, bool] = {}
        """Whether padding changes no bit, by range of row counts; n stands for the range that ends at 2 ** n."""

    def allows(self, rows: int) -> bool:
        """Return whether padding is allowed: torch must compute each row with the same bits among `rows` rows and among
        `filled_up(rows)` rows.

        Return False for few rows, for matrices that are too large to gain, and if the number of threads has changed.
        """
        if not _EXACT_ROWS < rows <= self._most_rows or torch.get_num_threads() != self.threads:
            return False
        octave = (rows - 1).bit_length()
        if octave not in self._proven:
            ends = tuple(end for end in ends_of_groups(1 << octave) if end > 1 << (octave - 1))
            self._proven[octave] = all(_is_the_same(shape, ends, self._dtype, self.threads) for shape in self._shapes)
        return self._proven[octave]


def product(x: torch.Tensor, matrix: torch.Tensor, filling: Filling | None) -> torch.Tensor:
    """Return the product x [n, K] @ matrix [K, N]. x is padded with zero rows if padding changes no bit."""
    rows = x.shape[0]
    if filling is None or not filling.allows(rows):
        return x @ matrix
    return (functional.pad(x, (0, 0, 0, filled_up(rows) - rows)) @ matrix)[:rows]


def _most_rows(shapes: Sequence[MatrixShape]) -> int:
    """Return the largest number of rows for which a test of padding with matrices of these shapes takes at most
    `_PROOF_OPERATIONS` operations."""
    elements = sum(shape.columns * shape.outputs for shape in shapes)
    most = _MOST_ROWS
    while most > _EXACT_ROWS and 2 * elements * sum(ends_of_groups(most)) > _PROOF_OPERATIONS:
        most //= 2
    return most


def ends_of_groups(most: int) -> list[int]:
    """Return, for every padded size up to `most` rows, the smallest and the largest number of rows that are padded to
    this size. The first number is 9."""
    ends = sorted({filled_up(rows) for rows in range(_EXACT_ROWS + 1, most + 1)})
    return sorted({*ends, *(before + 1 for before in [_EXACT_ROWS, *ends[:-1]])})


def telling(shape: MatrixShape, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, K] and a matrix [K, N] chosen so that the bits of their product reveal the order of summation."""
    columns, outputs, is_transposed = shape
    generator = torch.Generator().manual_seed(0)
    # each term occurs twice with opposite signs: what remains is rounding error, which depends on the order of sums
    half = torch.randn(rows, columns // 2, generator=generator)
    half = half * torch.randint(-6, 7, half.shape, generator=generator).exp2()
    weights = torch.randn(outputs, columns // 2, generator=generator)
    x = functional.pad(torch.cat([half, -half], 1), (0, columns % 2)).to(dtype)
    matrix = functional.pad(torch.cat([weights, weights], 1), (0, columns % 2)).to(dtype).t()
    return x, matrix if is_transposed else matrix.contiguous()


@functools.cache
def _is_the_same(shape: MatrixShape, numbers: tuple[int, ...], dtype: torch.dtype, threads: int) -> bool:
    """Return whether each row of a product has the same bits for all row counts in `numbers`, of which the last is the
    largest.

    The result is cached; it holds for this machine and this number of threads.
    """
    x, matrix = telling(shape, numbers[-1], dtype)
    whole = _multiply(x, matrix)
    return all(same_bits(_multiply(x[:rows], matrix), whole[:rows]) for rows in numbers)


def _multiply(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply [n, K] @ [K, N] by torch."""
    return x @ matrix
