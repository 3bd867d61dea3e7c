"""Chooses the codes of a matrix column by column, so that later columns compensate for rounding errors of earlier ones:
GPTQ (E. Frantar and others, arXiv 2210.17323).

For inputs x with second moments M, the squared error of an output is (q - w) M (q - w)', where w is a row of weights
and q the quantized row. If elements of the inputs are correlated, as in a layer, neighbouring weights can compensate
for the error of one weight:

    M + damping = U^-1 U^-T, U upper                  row j of U gives the change of later columns for an error in j
    code j = round(w_j), then w_k -= error of j * U_jk / U_jj    for every k > j in the section

Scales and minimums are those of `quantiser.py`; only the codes differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

SECTION = 2048
"""The number of columns that compensate for each other, a section. Memory grows with its square, time with its cube."""
_BATCH = 128
"""The number of columns whose errors are applied to the following columns of the section by one product."""
_DAMPING = 0.01
"""What is added to the diagonal of M, relative to the diagonal's mean, as in GPTQ."""
_PRIOR_TOKENS = 64
"""How many tokens of the expert's own the prior moments are worth."""


class CodeGrid(NamedTuple):
    """The values of codes, for every element [N, K] of a matrix: lowest + step * code."""

    lowest: torch.Tensor
    step: torch.Tensor
    least: int
    most: int


class _ColumnSection(NamedTuple):
    begin: int
    upper: torch.Tensor
    """The matrix U: [width, width]."""


def moments(inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the second moments of inputs [n, K], the mean products of their elements, as one matrix [width, width] for
    each section of columns. n is at least 1."""
    return [part.t() @ part / len(part) for part in inputs.float().split(SECTION, dim=1)]


class Compensation:
    """The rule by which later columns of one matrix compensate for the rounding errors of earlier columns."""

    def __init__(self, inputs: torch.Tensor, prior: Sequence[torch.Tensor] | None = None) -> None:
        """`inputs` [n, K]: the recorded inputs of the matrix, possibly few or none. `prior`: the second moments of
        similar inputs, one matrix for each section of columns; None: the elements of the inputs are taken as
        uncorrelated."""
        self._sections = []
        for n, part in enumerate(inputs.float().split(SECTION, dim=1)):
            width = part.shape[1]
            alone = torch.eye(width) * (float(part.square().mean()) if len(part) else 1.0)
            known = alone if prior is None else prior[n]
            moment = (part.t() @ part + _PRIOR_TOKENS * known).double() / (len(part) + _PRIOR_TOKENS)
            size = float(moment.diagonal().mean()) or 1.0
            moment.diagonal().add_(_DAMPING * size)
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment))
            self._sections.append(_ColumnSection(n * SECTION, torch.linalg.cholesky(inverse, upper=True).float()))

    def codes(self, numbers: torch.Tensor, grid: CodeGrid) -> torch.Tensor:
        """Return codes [N, K] for the matrix `numbers` [N, K], whose codes stand for the values in `grid`."""
        found = []
        for begin, upper in self._sections:
            own = slice(begin, begin + len(upper))
            found.append(
                _codes_of(_turned(numbers, own), _turned(grid.lowest, own), _turned(grid.step, own), grid, upper)
            )
        return torch.cat(found).t()


def _turned(numbers: torch.Tensor, columns: slice) -> torch.Tensor:
    """Return a range of columns of a matrix, transposed and contiguous: [width, N]."""
    return numbers[:, columns].t().contiguous()


def _codes_of(
    rest: torch.Tensor, lowest: torch.Tensor, step: torch.Tensor, grid: CodeGrid, upper: torch.Tensor
) -> torch.Tensor:
    """Return the codes [width, N] of one section, chosen column by column. All arguments are [width, N]; `rest` is
    modified."""
    codes, safe = torch.empty_like(rest), torch.where(step.abs() > 1e-30, step, 1e-30)  # steps may be negative
    for begin in range(0, len(rest), _BATCH):
        end = min(begin + _BATCH, len(rest))
        errors = torch.empty_like(rest[begin:end])
        for j in range(begin, end):
            codes[j] = ((rest[j] - lowest[j]) / safe[j]).round().clamp(grid.least, grid.most)
            errors[j - begin] = (rest[j] - lowest[j] - codes[j] * step[j]) / upper[j, j]
            rest[j + 1 : end] -= upper[j, j + 1 : end, None] * errors[j - begin]
        rest[end:] -= upper[begin:end, end:].t() @ errors
    return codes
