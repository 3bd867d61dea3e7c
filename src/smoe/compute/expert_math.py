"""The arithmetic of one expert: the operations of transformers' eager implementation, one by one, on weights in a slot.

Grade E0 depends on this file. It has the operations of transformers' eager loop, in the same order and with the same
shapes: `x @ up`, bias, gate, `@ down`, bias, post norm, routing weight, sum in ascending order of experts.
`load/selftest.py` compares both when a model is loaded. Our kernel may compute the product of a single row if it has
torch's bits (`kernels/spinning_pool.py`). If torch's order is slow, few rows may be multiplied in our own order (grade
E1, `kernels/own_order.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn

from smoe.compute.row_groups import Filling, MatrixShape, product
from smoe.gpu_kernels.activation import activation_of
from smoe.gpu_kernels.slot_experts import SlotExperts
from smoe.gpu_kernels.source import TYPES, ExpertKind, MatrixLayout
from smoe.kernels.elementwise import activation_table, is_table_of
from smoe.kernels.experts import TokenExperts
from smoe.kernels.matrix import Matrix, in_bf16
from smoe.kernels.proof import agrees, agrees_on_many_rows, agrees_on_rows, same_bits
from smoe.kernels.rows import MOST_ROWS
from smoe.kernels.spinning_pool import Product, SpinningPool
from smoe.kernels.threads import threads
from smoe.memory.arena import Arena
from smoe.memory.store import Part
from smoe.models.experts import is_transposed

ROUNDINGS = 4
"""The number of roundings to the model's dtype between an expert's input and output. Two correct results may differ by
that many roundings."""


def within_rounding(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two outputs of an expert differ by no more than the error of `ROUNDINGS` roundings."""
    far = (ours.float() - theirs.float()).abs().max()
    return bool(far <= ROUNDINGS * torch.finfo(theirs.dtype).eps * theirs.float().abs().max())


def library_products(products: Sequence[Product]) -> None:
    """Compute matrix products of single rows by torch. Each `Product` has the operands, and the tensor that receives
    the result."""
    for x, matrix, out, *_ in products:
        torch.mm(x, matrix, out=out)


def empty_sum(math: ExpertMath, hidden: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Return zeros [T, H] to which outputs of experts are added, in the dtype in which transformers adds them."""
    return torch.zeros_like(hidden, dtype=top_k_weights.dtype if math.sums_as_weights else hidden.dtype)


def add_rows(total: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Add `rows` [n, H] to the rows `tokens` [n] of `total` [T, H].

    On the CPU, torch divides even a few rows among all of its threads. If another program takes a core, that wait takes
    milliseconds, once for each expert; so one thread adds.
    """
    with threads(1):
        total.index_add_(0, tokens, rows)


class Weights(Protocol):
    """One expert's weights in a slot, as matrices for `x @ up` and `h @ down`. H is the hidden size, I the expert's
    inner size."""

    @property
    def up(self) -> torch.Tensor:
        """The matrix of the first product: [H, 2I] with gate and up in the family's order, or [H, I] without a gate."""

    @property
    def down(self) -> torch.Tensor:
        """The matrix of the expert's second product, [I, H]."""

    @property
    def up_bias(self) -> torch.Tensor | None: ...

    @property
    def down_bias(self) -> torch.Tensor | None: ...

    @property
    def matrices(self) -> Sequence[Matrix]:
        """The matrices as arguments for machine code: those that form `up`, then `down`."""

    @property
    def addresses(self) -> Sequence[int]:
        """The device addresses of the matrices `up` and `down`, followed by those of their biases."""


class DenseWeights(NamedTuple):
    """An expert's weights in the model's own dtype, as views of its slot."""

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    matrices: Sequence[Matrix]

    @property
    def addresses(self) -> Sequence[int]:
        biases = (bias.data_ptr() for bias in (self.up_bias, self.down_bias) if bias is not None)
        return [*(matrix.address for matrix in self.matrices), *biases]


class ProvenKernels(NamedTuple):
    """The kernels that compute a layer's experts. A test has compared each with torch. By default there are none, and
    torch computes everything."""

    pool: SpinningPool | None = None
    """Multiplies single rows, and few rows in its own order; None: torch."""
    token: TokenExperts | None = None
    """Computes few tokens through several experts at once on a CPU; None: there is none."""
    slots: SlotExperts | None = None
    """The GPU kernel that computes few tokens through several experts; None if torch computes them."""
    filling: Filling | None = None
    """The rule by which several rows are padded to one of few sizes; None if rows are not padded."""


class ExpertMath:
    """The arithmetic of one layer's experts, for weights in the model's dtype. The object is a value: `by` returns
    another object that uses other kernels."""

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[Part],
        dtype: torch.dtype,
        kernels: ProvenKernels = ProvenKernels(),  # noqa: B008 (a value)
        sums_as_weights: bool = False,
    ) -> None:
        """`parts`: the weight tensors that an expert has. `sums_as_weights`: outputs are summed in the dtype of the
        routing weights, not in that of the hidden states."""
        self._module = module
        self._shapes = {part.name: part.stored_shape for part in parts}
        self.dtype = dtype
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
        self.sums_as_weights = sums_as_weights
        self._use(kernels)
        self.hidden, self.up_width = up if self._up_is_transposed else up[::-1]
        self.inner = down[0] if self._down_is_transposed else down[1]

    def by(self, kernels: ProvenKernels) -> Self:
        """Return this arithmetic with other kernels: those in `kernels`."""
        math = copy(self)
        math._use(kernels)
        return math

    def by_pool(self, pool: SpinningPool | None) -> Self:
        """Return this arithmetic, with `pool` multiplying single rows; None: torch multiplies them."""
        return self.by(ProvenKernels(pool))

    def summing_as_weights(self) -> Self:
        """Return this arithmetic, with outputs summed in the dtype of the routing weights."""
        math = copy(self)
        math.sums_as_weights = True
        return math

    def _use(self, kernels: ProvenKernels) -> None:
        pool = kernels.pool
        self.kernels = kernels
        self.multiply: Callable[[Sequence[Product]], None] = library_products if pool is None else pool.multiply
        """The function that computes products of single rows."""
        self._own_order = pool if pool is not None and pool.own_order is not None else None

    @property
    def rounds_rows(self) -> bool:
        """Whether activation rows are rounded to 8 bits before products."""
        return False

    @property
    def prompt_kernel(self) -> TokenExperts | None:
        """The kernel that computes any number of tokens through these experts; None if there is none, as where torch
        multiplies many rows of bf16 faster."""
        pool, kernel = self.kernels.pool, self.kernels.token
        return kernel if pool is not None and pool.many is not None and not self.sums_as_weights else None

    @property
    def shapes(self) -> tuple[MatrixShape, MatrixShape]:
        """The shapes of the matrices of an expert's two products."""
        up, down = not self._up_is_transposed, not self._down_is_transposed  # attributes of the family's own layout
        return MatrixShape(self.hidden, self.up_width, up), MatrixShape(self.inner, self.hidden, down)

    @property
    def kind(self) -> tuple[object, ...]:
        """A value that is equal for layers whose experts can use the same kernel."""
        return self.hidden, self.inner

    @property
    def subject(self) -> tuple[object, ...]:
        """What results of proofs of these experts hold for: their kind, and the layout of their weights in slots, which
        depends on how many experts fit."""
        return self.kind

    @property
    def is_movable(self) -> bool:
        """Whether another device can compute these experts, because it needs only their weights."""
        return self._post_norm is None

    def bind(self, arena: Arena, slot: int, offsets: Mapping[str, int]) -> Weights:
        """Return the weights of the expert in `slot`, as views of the slot's memory. `offsets`: for each weight tensor,
        its offset in the slot in bytes."""

        def part(name: str) -> torch.Tensor:
            return arena.view(slot, offsets[name], self._shapes[name], self.dtype)

        up, down = part(self._up_name), part("down_proj")
        up, down = up if self._up_is_transposed else up.t(), down if self._down_is_transposed else down.t()
        matrices = in_bf16(up, down)
        if not self._has_bias:
            return DenseWeights(up, down, None, None, matrices)
        return DenseWeights(up, down, part(f"{self._up_name}_bias"), part("down_proj_bias"), matrices)

    def agrees(self, pool: SpinningPool, weights: Weights) -> bool:
        """Return whether our kernel has torch's bits with these weights. For a kernel with its own order of sums,
        return whether its error is no larger than torch's."""
        return all(agrees(pool, each) and agrees_on_many_rows(pool, each) for each in (weights.up, weights.down))

    def is_proof(self, pool: SpinningPool, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        """Return whether our kernel's output for one token, `ours`, is as close to torch's output as the pool promises:
        equal, or equal up to rounding if the pool has its own order of sums."""
        return same_bits(ours, theirs) if pool.own_order is None else within_rounding(ours, theirs)

    def most_rows(self, pool: SpinningPool, weights: Weights) -> int:
        """Return the largest number of tokens of one expert for which our kernel may be used. It is above 1 only if a
        test shows that the kernel has the required bits for several rows."""
        matrices = weights.up, weights.down
        is_proven = pool.several and all(agrees_on_rows(pool, each, n) for each in matrices for n in (2, MOST_ROWS))
        if pool.own_order is not None:
            return pool.few_rows if is_proven else 1
        return MOST_ROWS if is_proven else 1

    def kernel_of(self, pool: SpinningPool, most_rows: int = 1) -> TokenExperts | None:
        """Return the kernel that computes few tokens through these experts, or None if it does not support their
        structure. `most_rows`: the number of tokens of one expert for which a test has succeeded."""
        table = self.gate_table()
        return None if table is None else TokenExperts(pool, self.hidden, self.inner, table, most_rows)

    def slot_kind(self, alignment: int) -> ExpertKind | None:
        """Return the description from which GPU kernels for these experts are generated, or None if the experts are not
        supported.

        `alignment`: a power of two, in bytes, that divides the address of every matrix.
        """
        layouts, has_gate = self._layouts(alignment), bool(getattr(self._module, "has_gate", True))
        is_plain = self._post_norm is None and not self.sums_as_weights
        if not is_plain or layouts is None or len(layouts) > (3 if has_gate else 2):
            return None
        found, dtype = activation_of(self._module, self._activate, has_gate), str(self.dtype).removeprefix("torch.")
        if found is None or dtype not in TYPES or (found.takes_turns and len(layouts) > 2):
            return None
        return ExpertKind(self.hidden, self.inner, dtype, layouts[:-1], layouts[-1], found, self._has_bias)

    def _layouts(self, alignment: int) -> tuple[MatrixLayout, ...] | None:
        """Return the layouts of the matrices in a slot, in the order of `Weights.addresses`. None if GPU kernels cannot
        read them."""
        if alignment % self.dtype.itemsize:
            return None
        up = MatrixLayout(self.up_width, self.hidden, None, self._up_is_transposed, alignment)
        return up, MatrixLayout(self.hidden, self.inner, None, self._down_is_transposed, alignment)

    def numbers(self, weights: Weights, matrix: int, rows: slice) -> torch.Tensor:
        """Return some rows of one of an expert's matrices, dequantized to float32 [n, K], on the host. Each row belongs
        to one output.

        `matrix` is the index of the matrix in the order of `Weights.addresses`.
        """
        return (weights.down if matrix else weights.up).t()[rows].float().cpu()

    def gate_table(self) -> torch.Tensor | None:
        """Return the activation's value for every bf16 number, [65536]. Return None unless the experts are two matrix
        products with table[gate] * up between them."""
        return activation_table(self._activate) if self.is_gated_product else None

    @property
    def is_gated_product(self) -> bool:
        """Whether an expert is two products without bias, with a gated activation between them, and nothing else."""
        return not self._has_bias and self._post_norm is None and bool(getattr(self._module, "has_gate", True))

    def has_activation(self, table: torch.Tensor) -> bool:
        """Return whether `table` contains the values of these experts' activation function
        (`kernels/elementwise.py`)."""
        return is_table_of(table, self._activate)

    def forward(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Return the expert's output [n, H] for rows x [n, H], not yet multiplied by the routing weight."""
        y = self._times(x, weights.up)
        if weights.up_bias is not None:
            y = y + weights.up_bias
        y = self._times(self._activate(y), weights.down)
        if weights.down_bias is not None:
            y = y + weights.down_bias
        return y if self._post_norm is None else self._post_norm(y)

    def forward_each(self, x: torch.Tensor, weights: Sequence[Weights], out: torch.Tensor) -> None:
        """Compute one token x [1, H] through several experts, and write the output of each to one row of `out` [n, H].
        The rows equal those of `forward`.

        The matrix products are the same calls as in `forward`. Elementwise operations between them run once for all
        rows, which changes no bit and saves most of Python's time for small experts.
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
        """Return the product of x [n, K] and a matrix [K, N]."""
        rows, own_order = x.shape[0], self._own_order
        if rows == 1:
            out = x.new_empty(1, matrix.shape[1])
            self.multiply([Product(x.contiguous(), matrix, out)])
            return out
        if own_order is None or (own_order.many is None and rows > own_order.few_rows):
            return product(x, matrix, self.kernels.filling)
        out = x.new_empty(rows, matrix.shape[1])
        if own_order.many is None or rows <= own_order.few_rows:
            own_order.multiply_rows(x.contiguous(), matrix, out)
        else:
            own_order.many.multiply(x.contiguous(), matrix, out)
        return out
