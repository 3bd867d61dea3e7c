"""The arithmetic of a quantized expert. Few tokens are multiplied directly with the codes in the slot; for many tokens,
each matrix is dequantized first.

    few tokens    x times the codes in the slot                          (`kernels/quantised.py`)
    many tokens   slot -> a tile in the model's dtype -> x @ tile        one matrix at a time is dequantized

transformers has no such weights, so there are no bits to compare with. Results depend only on the input and the chosen
kernels (grade E1), and are as accurate as torch's products with dequantized weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from smoe.bounds import BF16
from smoe.compute.expert_math import ExpertMath, ProvenKernels, Weights, within_rounding
from smoe.compute.row_groups import MatrixShape, product
from smoe.formats.activations import fits
from smoe.formats.interleaved import as_in_file, in_rows
from smoe.gpu_kernels.decoding import fits as has_text
from smoe.gpu_kernels.source import MatrixLayout
from smoe.kernels.expert_work import Expert
from smoe.kernels.experts import TokenExperts
from smoe.kernels.matrix import Matrix, in_memory, products_of
from smoe.kernels.proof import is_as_near
from smoe.kernels.quantised_work import most_quantised_rows
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.unpacked import unpacked
from smoe.memory.arena import Arena
from smoe.memory.quantised_store import StoredMatrix
from smoe.memory.store import Part

_PROOF_OUTPUTS = 64


class UnpackedTile:
    """Memory for one dequantized matrix of an expert. All layers share it, and one thread at a time uses it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._memory = torch.empty(0, dtype=dtype)

    def take(self, outputs: int, columns: int, device: torch.device) -> torch.Tensor:
        """Return memory for a dequantized matrix [outputs, columns]. It overwrites the matrix that was there before."""
        if self._memory.numel() < outputs * columns or self._memory.device != device:
            self._memory = torch.empty(outputs * columns, dtype=self.dtype, device=device)
        return self._memory[: outputs * columns].view(outputs, columns)


class QuantisedWeights:
    """One quantized expert in its slot. Reading `up` or `down` dequantizes the matrix into memory that both attributes
    share, so each access overwrites the matrix of the other."""

    def __init__(
        self,
        data: Sequence[tuple[StoredMatrix, torch.Tensor]],
        tile: UnpackedTile,
        activations: str,
        pool: SpinningPool | None,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        """`data`: for each matrix, its description and its bytes [outputs, bytes of a row]; the last matrix is that of
        the second product. `pool`: the threads that dequantize; None: torch dequantizes. `up_bias` [2I] and `down_bias`
        [H] have the model's dtype, in the order of the outputs."""
        self.data = data
        self._tile = tile
        self._activations = activations
        self._pool = pool
        self.up_bias = up_bias
        self.down_bias = down_bias

    @cached_property
    def matrices(self) -> Sequence[Matrix]:
        """The matrices as arguments for machine code. The code is compiled on first access, which takes some tenths of
        a second for each format."""
        return [self._matrix(*each) for each in self.data]

    @cached_property
    def addresses(self) -> Sequence[int]:
        biases = (bias.data_ptr() for bias in (self.up_bias, self.down_bias) if bias is not None)
        return [*(rows.data_ptr() for _, rows in self.data), *biases]

    def _matrix(self, stored: StoredMatrix, rows: torch.Tensor) -> Matrix:
        products = products_of(stored.form, self._activations)
        return Matrix(rows.data_ptr(), stored.outputs, stored.columns, products)

    @property
    def up(self) -> torch.Tensor:
        return self._unpacked(slice(None, -1))

    @property
    def down(self) -> torch.Tensor:
        return self._unpacked(slice(-1, None))

    def _unpacked(self, which: slice) -> torch.Tensor:
        """Return the matrices `which`, dequantized, concatenated and transposed for `x @ ...`."""
        data, tile = [_as_in_file(*each) for each in self.data[which]], self._tile
        stored, rows = data[0]
        out = tile.take(sum(each.outputs for each, _ in data), stored.columns, rows.device)
        begins = [0]
        for each, _ in data:
            begins.append(begins[-1] + each.outputs)
        if self._pool is not None:
            self._pool.unpack(
                [(self._matrix(*each), out[at].data_ptr()) for each, at in zip(data, begins, strict=False)]
            )
        else:
            for (each, bytes_), at in zip(data, begins, strict=False):
                out[at : at + each.outputs] = unpacked(each.form, bytes_, tile.dtype)
        return out.t()


def _as_in_file(stored: StoredMatrix, rows: torch.Tensor) -> tuple[StoredMatrix, torch.Tensor]:
    """Return a matrix with its rows in the layout of the file; a copy if they are interleaved."""
    if stored.form.rows == 1:
        return stored, rows
    return stored._replace(form=as_in_file(stored.form)), torch.from_numpy(in_rows(stored.form, rows.numpy()))


class QuantisedMath(ExpertMath):
    """The arithmetic of one layer's experts with quantized weights.

    If transformers interleaves gate and up but the file stores them separately, their outputs are interleaved before
    the activation.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[Part],
        dtype: torch.dtype,
        stored: Sequence[StoredMatrix],
        tile: UnpackedTile,
        activations: str = BF16,
        kernels: ProvenKernels = ProvenKernels(),  # noqa: B008 (a value)
        may_interleave: bool = False,
    ) -> None:
        """`stored`: the matrices of an expert; `activations`: the type in which our kernels multiply few rows
        (`EngineConfig.activations`). `may_interleave`: whether rows of the matrices may be interleaved in slots, where
        products with our kernels gain from it."""
        super().__init__(module, parts, dtype, kernels)
        self._stored = stored
        self._tile = tile
        self._activations = activations
        if may_interleave and self._post_norm is None and all(fits(each.form) for each in stored):
            self._stored = [each._replace(form=in_memory(each.form, each.outputs, activations)) for each in stored]
        if any(part.takes_turns for part in parts):
            activate = self._activate
            self._activate = lambda wide: activate(wide.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))

    @property
    def rounds_rows(self) -> bool:
        """Whether activation rows are rounded to 8 bits before products."""
        return self.kernels.pool is not None and self._post_norm is None and any(self._are_in_bytes())

    @property
    def prompt_kernel(self) -> TokenExperts | None:
        """The kernel that computes any number of tokens through these experts in 8 bits; None if a matrix has no such
        product."""
        kernel = self.kernels.token
        return kernel if kernel is not None and not self.sums_as_weights and all(self._are_in_bytes()) else None

    @property
    def stored(self) -> Sequence[StoredMatrix]:
        """The matrices of an expert, with the formats that they have in a slot."""
        return self._stored

    @property
    def is_interleaved(self) -> bool:
        """Whether rows of a matrix are interleaved in slots."""
        return any(each.form.rows > 1 for each in self._stored)

    def _are_in_bytes(self) -> list[bool]:
        """Return for each matrix whether our kernel multiplies it with activation rows in 8 bits."""
        products = [products_of(each.form, self._activations) for each in self._stored]
        return [each is not None and each.in_bytes is not None for each in products]

    @property
    def shapes(self) -> tuple[MatrixShape, MatrixShape]:
        """The shapes of the matrices of both products after dequantizing, which keeps the stored order of rows."""
        return MatrixShape(self.hidden, self.up_width, True), MatrixShape(self.inner, self.hidden, True)

    @property
    def kind(self) -> tuple[object, ...]:
        return (*super().kind, *(each.form.name for each in self._stored))

    @property
    def subject(self) -> tuple[object, ...]:
        return (*self.kind, *(each.form.rows for each in self._stored))

    def bind(self, arena: Arena, slot: int, offsets: Mapping[str, int]) -> Weights:
        data, rows = [], arena.tensor(slot)
        for each in self._stored:
            begin = offsets[each.name]
            data.append((each, rows[begin : begin + each.nbytes].view(each.outputs, -1)))
        if not self._has_bias:
            return QuantisedWeights(data, self._tile, self._activations, self.kernels.pool)
        names = f"{self._up_name}_bias", "down_proj_bias"
        biases = (arena.view(slot, offsets[name], self._shapes[name], self.dtype) for name in names)
        return QuantisedWeights(data, self._tile, self._activations, self.kernels.pool, *biases)

    def _layouts(self, alignment: int) -> tuple[MatrixLayout, ...] | None:
        if not all(has_text(each.form) for each in self._stored):
            return None
        return tuple(MatrixLayout(each.outputs, each.columns, each.form, alignment=alignment) for each in self._stored)

    def numbers(self, weights: Weights, matrix: int, rows: slice) -> torch.Tensor:
        assert isinstance(weights, QuantisedWeights)
        stored, data = weights.data[matrix]
        stored, data = _as_in_file(stored, data)
        return torch.from_numpy(stored.form.decode(data[rows].cpu().numpy()))

    def agrees(self, pool: SpinningPool, weights: Weights) -> bool:
        """Return whether our kernel's error is no larger than that of torch's product with dequantized weights."""
        assert isinstance(weights, QuantisedWeights)
        in_file = [_as_in_file(*each) for each in weights.data]
        return all(
            matrix.products is not None and is_as_near(pool, matrix, stored.form, rows[:_PROOF_OUTPUTS])
            for matrix, (stored, rows) in zip(weights.matrices, in_file, strict=True)
        )

    def is_proof(self, pool: SpinningPool, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        return within_rounding(ours, theirs)

    def most_rows(self, pool: SpinningPool, weights: Weights) -> int:
        """Return the largest number of rows that the kernel multiplies with these weights. All of these numbers give
        the same grade of exactness."""
        return most_quantised_rows(weights.matrices)

    def forward_each(self, x: torch.Tensor, weights: Sequence[Weights], out: torch.Tensor) -> None:
        for row, expert in enumerate(weights):  # all experts share one tile
            out[row : row + 1] = self.forward(x, expert)

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        pool, kernel = self.kernels.pool, self.kernels.token
        if pool is None or x.shape[0] > most_quantised_rows(weights.matrices) or self._post_norm is not None:
            return super().forward(x, weights)
        if kernel is not None and x.shape[0] > 1:
            rows = x.new_empty(x.shape[0], self.hidden)
            kernel.forward(x.contiguous(), [Expert(weights.matrices, [(n, n) for n in range(len(x))])], rows)
            return rows
        *ups, down = weights.matrices
        wide = self._multiplied(pool, x, ups, weights.up_bias)
        return self._multiplied(pool, self._activate(wide), [down], weights.down_bias)

    def _multiplied(
        self, pool: SpinningPool, x: torch.Tensor, matrices: Sequence[Matrix], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the products of a few rows x with `matrices`, concatenated, plus the bias."""
        x, out = x.contiguous(), x.new_empty(x.shape[0], sum(matrix.outputs for matrix in matrices))
        pool.multiply_quantised(x, matrices, out)
        return out if bias is None else out.add_(bias)

    def _times(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return x @ matrix if x.shape[0] == 1 else product(x, matrix, self.kernels.filling)
