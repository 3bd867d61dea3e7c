"""The product of one row and a bf16 matrix, with oneDNN's bits at the speed of memory.

Decoding multiplies one row with every matrix, so each weight is used once, and memory bandwidth is the limit. oneDNN
(torch's CPU library) reaches half of it, because it first copies the matrix into another layout, as it would for many
rows. Here 16 rows of weights are transposed in registers instead:

    memory: W [N, K], row by row                registers: 16 x 16 pairs of weights, transposed
    row n    | k k+1 | k+2 k+3 | ...     ->     pair k      of rows n .. n+15      dot x[k, k+1]
    row n+1  | k k+1 | ...                      pair k+2    of rows n .. n+15      dot x[k+2, k+3]
    ...                                         ...         each lane is one output

Grade E0 requires torch's bits, which depend on the order of sums. oneDNN's order (brgemm, AVX-512 BF16) was found by
experiments. For every output there is one running sum over k in steps of two, which restarts every 512 k; the sums of
these chains are added in sequence. With several rows it restarts every 1024 k if K exceeds 1024. With few outputs and
large K, each thread sums a part of the k, and the parts are added at the end.

This kernel uses the same instruction in the same order. When a model is loaded, its bits are compared with torch's on
the model's own weights (`spinning_pool.py`); if they differ, torch computes. The weights `AHEAD` elements further, in
these rows or in the next 16, are prefetched, because rows of 768 elements are too short for hardware prefetchers.
Measurements are in docs/log/kernels.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LANES = 16
"""The number of outputs that are computed together: the 32-bit lanes of one register."""
TILE = 32
"""The number of elements along K in one step: the bf16 numbers of one register."""
AHEAD = 512
"""The distance between computation and prefetch, in elements along K. For 16 rows these are 16 KB, a part of the
first-level cache."""
CHAIN = 512
"""The number of elements along K after which the running sum of a single row restarts."""
_LEAST_WEIGHTS = 16**3
"""For products with at most this number of multiplications, torch uses another library than oneDNN."""


def fits(matrix: torch.Tensor) -> bool:
    """Return whether the kernel supports a matrix [K, N]: a bf16 CPU tensor that is contiguous along K, with a
    supported shape."""
    import torch

    columns, rows = matrix.shape
    is_rows = matrix.stride() == (1, columns) and matrix.dtype is torch.bfloat16 and matrix.device.type == "cpu"
    return is_rows and fits_shape(columns, rows)


def fits_shape(columns: int, outputs: int) -> bool:
    """Return whether the kernel supports a matrix of this shape that is stored row by row."""
    return columns % TILE == 0 and outputs % LANES == 0 and outputs * columns > _LEAST_WEIGHTS


def chain_of(columns: int, rows: int) -> int:
    """Return the number of elements along K after which torch restarts a running sum, when it multiplies `rows` rows of
    `columns` elements."""
    return 2 * CHAIN if rows > 1 and columns > 2 * CHAIN else CHAIN
