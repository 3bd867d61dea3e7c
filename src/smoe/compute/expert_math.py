"""How one expert computes: the library's eager arithmetic, operation by operation, on weights that sit in a slot.

Grade E0 rests on this file: same operations on the same shapes in the same order as the eager loop of `transformers`
(`x @ up`, bias, gate, `@ down`, bias, post norm, routing weight, sum in ascending expert order). `load/selftest.py`
compares it with the library's own loop when a model is loaded. The product of a single row may be our kernel's, where
its bits have been found to be the library's (`kernels/spinning_pool.py`); where they cannot be had at speed, few rows
may be multiplied in an order of our own (grade E1, `kernels/own_order.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from smoe.compute.row_groups import Filling, MatrixShape, product
from smoe.gpu_kernels.activation import activation_of
from smoe.gpu_kernels.slot_experts import SlotExperts
from smoe.gpu_kernels.source import TYPES, ExpertKind, MatrixLayout
from smoe.kernels.elementwise import activation_table, is_table_of
from smoe.kernels.experts import TokenExperts
from smoe.kernels.matrix import Matrix, in_bf16
from smoe.kernels.proof import agrees, agrees_on_rows, same_bits
from smoe.kernels.rows import MOST_ROWS
from smoe.kernels.spinning_pool import Product, SpinningPool
from smoe.memory.arena import Arena
from smoe.memory.store import Part
from smoe.models.experts import is_transposed

ROUNDINGS = 4
"""Roundings to the model's type between input and output of an expert: two right results may differ by as many."""


def within_rounding(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two outputs of experts may both be right."""
    far = (ours.float() - theirs.float()).abs().max()
    return bool(far <= ROUNDINGS * torch.finfo(theirs.dtype).eps * theirs.float().abs().max())


def library_products(products: Sequence[Product]) -> None:
    """One-row products by torch."""
    for x, matrix, out, *_ in products:
        torch.mm(x, matrix, out=out)


def empty_sum(math: ExpertMath, hidden: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Zeros [T, H] to add outputs to, in the type that the library adds them up in."""
    return torch.zeros_like(hidden, dtype=top_k_weights.dtype if math.sums_as_weights else hidden.dtype)


class Weights(Protocol):
    """One expert in its slot, ready for `x @ up` and `h @ down`."""

    @property
    def up(self) -> torch.Tensor:
        """[H, 2I] (gate and up side by side, as the family has them) or [H, I] without a gate."""

    @property
    def down(self) -> torch.Tensor:
        """[I, H]"""

    @property
    def up_bias(self) -> torch.Tensor | None: ...

    @property
    def down_bias(self) -> torch.Tensor | None: ...

    @property
    def matrices(self) -> Sequence[Matrix]:
        """The same for machine code: what `up` is made of, then `down`."""

    @property
    def addresses(self) -> Sequence[int]:
        """Where the matrices lie on the device, then the biases."""


class DenseWeights(NamedTuple):
    """Weights in the model's own type: views into the slot."""

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    matrices: Sequence[Matrix]

    @property
    def addresses(self) -> Sequence[int]:
        biases = (bias.data_ptr() for bias in (self.up_bias, self.down_bias) if bias is not None)
        return [*(matrix.address for matrix in self.matrices), *biases]


class ExpertMath:
    """The arithmetic of one layer's experts module."""

    def __init__(self, module: nn.Module, parts: Sequence[Part], dtype: torch.dtype) -> None:
        self._module = module
        self._shapes = {part.name: part.stored_shape for part in parts}
        self._dtype = dtype
        self._up_name = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
        self._up_is_transposed, self._down_is_transposed = (
            is_transposed(module, part.name) != part.is_turned
            for name in (self._up_name, "down_proj")
            for part in parts
            if part.name == name
        )
        self._has_bias = bool(getattr(module, "has_bias", False))
        activate: Any = module._apply_gate if getattr(module, "has_gate", True) else module.act_fn
        post_norm: Any = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
        self._activate: Callable[[torch.Tensor], torch.Tensor] = activate
        self._post_norm: Callable[[torch.Tensor], torch.Tensor] | None = post_norm
        up, down = self._shapes[self._up_name], self._shapes["down_proj"]
        self.multiply: Callable[[Sequence[Product]], None] = library_products
        """What multiplies single rows."""
        self._own_order: SpinningPool | None = None
        """Where set, multiplies few rows, too, in an order of its own."""
        self.kernel: TokenExperts | None = None
        """Where set, takes one token through several experts at once."""
        self.slots: SlotExperts | None = None
        """Where set, takes few tokens through several experts at once on a GPU."""
        self.filling: Filling | None = None
        """Where set, several rows are filled up to one of few numbers."""
        self.sums_as_weights = False
        """Whether outputs are added up in the type of the routing weights, and not in that of the hidden states."""
        self.hidden, self.up_width = up if self._up_is_transposed else up[::-1]
        self.inner = down[0] if self._down_is_transposed else down[1]

    def compute_by(self, pool: SpinningPool | None, kernel: TokenExperts | None) -> None:
        """Compute single rows by our kernels from now on: `pool` multiplies them, `kernel` takes one token through
        several experts. Without a pool the library does both."""
        self.multiply = library_products if pool is None else pool.multiply
        self._own_order = pool if pool is not None and pool.own_order is not None else None
        self.kernel = kernel

    @property
    def rounds_rows(self) -> bool:
        """Whether rows are rounded to 8 bits before they are multiplied."""
        return False

    @property
    def byte_kernel(self) -> TokenExperts | None:
        """What takes any number of tokens through these experts in 8 bits, where something does."""
        return None

    @property
    def shapes(self) -> tuple[MatrixShape, MatrixShape]:
        """The shapes of the two matrices."""
        up, down = not self._up_is_transposed, not self._down_is_transposed  # the family's word is for its own layout
        return MatrixShape(self.hidden, self.up_width, up), MatrixShape(self.inner, self.hidden, down)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers whose experts one kernel computes alike."""
        return self.hidden, self.inner

    @property
    def is_movable(self) -> bool:
        """Whether another device can compute it: everything but the experts' own weights is arithmetic."""
        return self._post_norm is None

    def bind(self, arena: Arena, slot: int, offsets: Mapping[str, int]) -> Weights:
        """Views of the expert in `slot`; `offsets` are the parts' slot offsets in bytes."""

        def part(name: str) -> torch.Tensor:
            return arena.view(slot, offsets[name], self._shapes[name], self._dtype)

        up, down = part(self._up_name), part("down_proj")
        up, down = up if self._up_is_transposed else up.t(), down if self._down_is_transposed else down.t()
        matrices = in_bf16(up, down)
        if not self._has_bias:
            return DenseWeights(up, down, None, None, matrices)
        return DenseWeights(up, down, part(f"{self._up_name}_bias"), part("down_proj_bias"), matrices)

    def agrees(self, pool: SpinningPool, weights: Weights) -> bool:
        """Whether our kernel gives the library's bits on these weights of one expert, or, in an order of its own, is as
        near to the exact numbers."""
        return agrees(pool, weights.up) and agrees(pool, weights.down)

    def is_proof(self, pool: SpinningPool, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        """Whether one token's output by our kernel is what the library's operations give."""
        return same_bits(ours, theirs) if pool.own_order is None else within_rounding(ours, theirs)

    def most_rows(self, pool: SpinningPool, weights: Weights) -> int:
        """Tokens of one expert that our kernel may take at once: more than one where the bits stay the library's."""
        matrices = weights.up, weights.down
        is_proven = pool.several and all(agrees_on_rows(pool, each, n) for each in matrices for n in (2, MOST_ROWS))
        if pool.own_order is not None:
            return pool.most_own_rows if is_proven else 1
        return MOST_ROWS if is_proven else 1

    def kernel_of(self, pool: SpinningPool) -> TokenExperts | None:
        """The kernel for one token through these experts, or None where they are of no kind that it knows."""
        table = self.gate_table()
        return None if table is None else TokenExperts(pool, self.hidden, self.inner, table)

    def slot_kind(self, alignment: int) -> ExpertKind | None:
        """What kernels for GPUs are made for these experts from; None where they have something that those lack.

        `alignment`: a power of two that divides the address of every matrix, in bytes.
        """
        layouts, has_gate = self._layouts(alignment), bool(getattr(self._module, "has_gate", True))
        is_plain = self._post_norm is None and not self.sums_as_weights
        if not is_plain or layouts is None or len(layouts) > (3 if has_gate else 2):
            return None
        found, dtype = activation_of(self._module, self._activate, has_gate), str(self._dtype).removeprefix("torch.")
        if found is None or dtype not in TYPES or (found.takes_turns and len(layouts) > 2):
            return None
        return ExpertKind(self.hidden, self.inner, dtype, layouts[:-1], layouts[-1], found, self._has_bias)

    def _layouts(self, alignment: int) -> tuple[MatrixLayout, ...] | None:
        """The layouts of the matrices in a slot, in the order of `Weights.addresses`; None where a kernel could not
        read them."""
        if alignment % self._dtype.itemsize:
            return None
        up = MatrixLayout(self.up_width, self.hidden, None, self._up_is_transposed, alignment)
        return up, MatrixLayout(self.hidden, self.inner, None, self._down_is_transposed, alignment)

    def numbers(self, weights: Weights, matrix: int, rows: slice) -> torch.Tensor:
        """Some outputs of a matrix of an expert, in the order of `Weights.addresses`, as the exact numbers that they
        stand for: [n, K] in float32, on the host."""
        return (weights.down if matrix else weights.up).t()[rows].float().cpu()

    def gate_table(self) -> torch.Tensor | None:
        """bf16 [65536]: the activation of every number, where two products and table[gate] * up are all that these
        experts are; else None."""
        return activation_table(self._activate) if self.is_gated_product else None

    @property
    def is_gated_product(self) -> bool:
        """Whether nothing is added to the two products, and something with a gate is between them."""
        return not self._has_bias and self._post_norm is None and bool(getattr(self._module, "has_gate", True))

    def has_activation(self, table: torch.Tensor) -> bool:
        """Whether the experts' activation is this one (`kernels/elementwise.py`)."""
        return is_table_of(table, self._activate)

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[n, H] -> [n, H], before the routing weight."""
        y = self._times(x, weights.up)
        if weights.up_bias is not None:
            y = y + weights.up_bias
        y = self._times(self._activate(y), weights.down)
        if weights.down_bias is not None:
            y = y + weights.down_bias
        return y if self._post_norm is None else self._post_norm(y)

    def forward_each(self, x: torch.Tensor, weights: Sequence[Weights], out: torch.Tensor) -> None:
        """One token through several experts: x [1, H] -> out [n, H], row by row what `forward` gives.

        The matrix products are the same calls; what lies between them runs once for all rows, which is elementwise and
        therefore changes no bit, and saves most of Python's share for small experts.
        """
        if self._has_bias or self._post_norm is not None:
            for row, expert in enumerate(weights):
                out[row : row + 1] = self.forward(x, expert)
            return
        x, wide = x.contiguous(), x.new_empty(len(weights), self.up_width)
        self.multiply([Product(x, expert.up, row) for expert, row in zip(weights, wide.split(1), strict=True)])
        rows = zip(weights, self._activate(wide).contiguous().split(1), out.split(1), strict=True)
        self.multiply([Product(inner, expert.down, row) for expert, inner, row in rows])

    def _times(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        rows, own_order = x.shape[0], self._own_order
        if rows == 1:
            out = x.new_empty(1, matrix.shape[1])
            self.multiply([Product(x.contiguous(), matrix, out)])
            return out
        if own_order is None or rows > own_order.most_own_rows:
            return product(x, matrix, self.filling)
        out = x.new_empty(rows, matrix.shape[1])
        own_order.multiply_rows(x.contiguous(), matrix, out)
        return out
