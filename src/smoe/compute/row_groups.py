"""Pad groups of rows to a few sizes, because torch's library compiles a kernel for every new size.

A prompt routes another number of tokens to every expert. So most products would first compile a kernel (0.2 to 0.5 ms,
while a small expert's product takes 0.03) and evict another one. Groups padded with zeros to one of few sizes find a
compiled kernel. On some CPUs the order of sums depends on the number of rows, and padding would change bits. So this is
tested before the first padded group, with data that reveal it.
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
"""The number of sizes per octave: at most a fifth is padding, a tenth on average."""
_MOST_ROWS = 512
_PROOF_OPERATIONS = 20e9
"""The largest number of operations of a test, which takes a tenth of a second. Larger experts would gain nothing from
padding."""


def filled_up(rows: int) -> int:
    """Return the padded number of rows: 1 to 8, then four sizes per octave."""
    if rows <= _EXACT_ROWS:
        return rows
    step = (1 << ((rows - 1).bit_length() - 1)) // _STEPS
    return -(-rows // step) * step


class MatrixShape(NamedTuple):
    """The shape of a matrix [K, N] that rows are multiplied by."""

    columns: int
    """The K dimension."""
    outputs: int
    """The N dimension."""
    is_transposed: bool
    """Whether the matrix is stored as [N, K]."""


class Filling:
    """The decision which products may be padded: those with matrices of these shapes, on the current number of threads.

    Each octave is tested when a number of rows first needs it, because every test leaves compiled kernels behind: 25
    MiB for all octaves.
    """

    def __init__(self, shapes: Sequence[MatrixShape], dtype: torch.dtype) -> None:
        self.threads = torch.get_num_threads()
        self._shapes = shapes
        self._dtype = dtype
        self._most_rows = _most_rows(shapes)
        self._proven: dict[int, bool] = {}
        """For each octave of row counts, by the exponent of its end (2 ** n): whether padding was found to change no
        bit."""

    def allows(self, rows: int) -> bool:
        """Return whether torch computes a row with the same bits for `rows` and for `filled_up(rows)` rows.

        Returns False for few rows, for matrices that are too large to gain, and on another number of threads.
        """
        if not _EXACT_ROWS < rows <= self._most_rows or torch.get_num_threads() != self.threads:
            return False
        octave = (rows - 1).bit_length()
        if octave not in self._proven:
            ends = tuple(end for end in ends_of_groups(1 << octave) if end > 1 << (octave - 1))
            self._proven[octave] = all(_is_the_same(shape, ends, self._dtype, self.threads) for shape in self._shapes)
        return self._proven[octave]


def product(x: torch.Tensor, matrix: torch.Tensor, filling: Filling | None) -> torch.Tensor:
    """Return [n, K] @ [K, N] -> [n, N], with x padded by zeros if that changes no bit."""
    rows = x.shape[0]
    if filling is None or not filling.allows(rows):
        return x @ matrix
    return (functional.pad(x, (0, 0, 0, filled_up(rows) - rows)) @ matrix)[:rows]


def _most_rows(shapes: Sequence[MatrixShape]) -> int:
    """Return the largest number of rows for which a test with these matrices stays within the limit."""
    elements = sum(shape.columns * shape.outputs for shape in shapes)
    most = _MOST_ROWS
    while most > _EXACT_ROWS and 2 * elements * sum(ends_of_groups(most)) > _PROOF_OPERATIONS:
        most //= 2
    return most


def ends_of_groups(most: int) -> list[int]:
    """Return both ends of every range of numbers from 9 to `most` that are padded to the same size."""
    ends = sorted({filled_up(rows) for rows in range(_EXACT_ROWS + 1, most + 1)})
    return sorted({*ends, *(before + 1 for before in [_EXACT_ROWS, *ends[:-1]])})


def telling(shape: MatrixShape, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, K] and a matrix [K, N] whose product reveals the order of summation."""
    columns, outputs, is_transposed = shape
    generator = torch.Generator().manual_seed(0)
    # each term occurs twice with opposite signs: the rest is rounding error, which depends on the order of the sum
    half = torch.randn(rows, columns // 2, generator=generator)
    half = half * torch.randint(-6, 7, half.shape, generator=generator).exp2()
    weights = torch.randn(outputs, columns // 2, generator=generator)
    x = functional.pad(torch.cat([half, -half], 1), (0, columns % 2)).to(dtype)
    matrix = functional.pad(torch.cat([weights, weights], 1), (0, columns % 2)).to(dtype).t()
    return x, matrix if is_transposed else matrix.contiguous()


@functools.cache
def _is_the_same(shape: MatrixShape, numbers: tuple[int, ...], dtype: torch.dtype, threads: int) -> bool:
    """Return whether a row's bits are equal for all these numbers of rows (the last is the largest).

    The result is cached for this machine and number of threads.
    """
    x, matrix = telling(shape, numbers[-1], dtype)
    whole = _multiply(x, matrix)
    return all(same_bits(_multiply(x[:rows], matrix), whole[:rows]) for rows in numbers)


def _multiply(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply [n, K] @ [K, N] by torch."""
    return x @ matrix
