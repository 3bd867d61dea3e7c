"""The arithmetic of all layers' experts on one device. It is a value: while a model is loaded, methods return new
values with other kernels, until all kernels have been tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from smoe.bounds import BF16, INT8
from smoe.compute.decode_experts import begin_of
from smoe.compute.expert_math import ExpertMath, ProvenKernels
from smoe.compute.row_groups import Filling, MatrixShape
from smoe.compute.thread_pool import ThreadPool
from smoe.expert import EXACT, ExpertKey
from smoe.gpu_kernels.slot_experts import SlotExperts
from smoe.kernels.experts import TokenExperts
from smoe.kernels.spinning_pool import SpinningPool

Place = tuple[int, int]
"""(layer, format)."""


class Experts:
    """The arithmetic of all experts on one device, by layer and format."""

    def __init__(self, maths: Mapping[Place, ExpertMath], helpers: SpinningPool | ThreadPool | None = None) -> None:
        """`maths`: the arithmetic by (layer, format). `helpers`: the threads that multiply single rows. A
        `SpinningPool` multiplies by our kernels; a `ThreadPool` by the library, with one thread for each expert. None:
        the library multiplies with its own threads."""
        self.maths = maths
        self.spinning_pool = helpers if isinstance(helpers, SpinningPool) else None
        self.thread_pool = helpers if isinstance(helpers, ThreadPool) else None
        layers: dict[int, dict[int, ExpertMath]] = {}
        for (layer, form), math in maths.items():
            layers.setdefault(layer, {})[form] = math
        self.begin = {layer: begin_of(of, self.thread_pool) for layer, of in layers.items()}
        """For each layer, the function that begins the computation of its experts for few tokens."""
        self.token_kernels = {layer: _token_kernel(list(of.values())) for layer, of in layers.items()}
        """For each layer, the kernel that computes one token through all its experts at once; None if there is no such
        kernel."""
        pool = self.spinning_pool
        self.adapt: Callable[[bool, bool], None] = _adapt_nothing if pool is None else pool.adapt
        """Adapts the threads of smoe's kernels to the following jobs (`SpinningPool.adapt`)."""

    def by(
        self, helpers: SpinningPool | ThreadPool | None, kernels: Mapping[Place, TokenExperts] | None = None
    ) -> Experts:
        """Return these experts with other `helpers`, and with `kernels`, by (layer, format), for few tokens. A test
        must have shown that the pool gives correct results for these experts."""
        pool, found = helpers if isinstance(helpers, SpinningPool) else None, kernels or {}
        return Experts(
            {
                place: math.by(math.kernels._replace(pool=pool, token=found.get(place)))
                for place, math in self.maths.items()
            },
            helpers,
        )

    def in_slots(self, kernels: Mapping[Place, SlotExperts] | None) -> Experts:
        """Return these experts, with few tokens computed by the GPU kernels `kernels`, by (layer, format); None: torch
        computes them."""
        return self._with(lambda place, of: of._replace(slots=None if kernels is None else kernels[place]))

    def filling_up_rows(self, dtype: torch.dtype) -> Experts:
        """Return these experts, with the rows of each expert padded to one of a few fixed numbers of rows if padding
        changes no bit of the results."""
        found: dict[tuple[MatrixShape, MatrixShape], Filling] = {}
        for math in self.maths.values():
            if math.shapes not in found:
                found[math.shapes] = Filling(math.shapes, dtype)
        return self._with(lambda place, of: of._replace(filling=found[self.maths[place].shapes]))

    def summing_as_weights(self) -> Experts:
        """Return these experts, with outputs summed in the data type of the routing weights."""
        return Experts({place: math.summing_as_weights() for place, math in self.maths.items()}, self._helpers)

    @property
    def sums_as_weights(self) -> bool:
        """Whether outputs are summed in the data type of the routing weights."""
        return any(math.sums_as_weights for math in self.maths.values())

    def _with(self, change: Callable[[Place, ProvenKernels], ProvenKernels]) -> Experts:
        maths = {place: math.by(change(place, math.kernels)) for place, math in self.maths.items()}
        return Experts(maths, self._helpers)

    @property
    def _helpers(self) -> SpinningPool | ThreadPool | None:
        return self.spinning_pool or self.thread_pool

    @property
    def helpers(self) -> list[SpinningPool | ThreadPool]:
        """The pools of threads that compute the experts."""
        return [each for each in (self.spinning_pool, self.thread_pool) if each is not None]

    def math_of(self, key: ExpertKey) -> ExpertMath:
        """Return the arithmetic for the expert copy `key`: (layer, expert, format)."""
        return self.maths[key[0], key[2]]

    def kind(self, layer: int) -> tuple[object, ...]:
        """Return a value that is equal for two layers if their experts are computed in the same way."""
        return self.maths[layer, EXACT].kind

    def hidden_size(self, layer: int) -> int:
        """Return the hidden size H of a layer, the length of the rows that its experts take."""
        return self.maths[layer, EXACT].hidden

    @property
    def multiplies_codes(self) -> bool:
        """Whether our kernels multiply all quantized experts directly from their codes, without dequantizing them
        first."""
        return self.spinning_pool is not None and all(math.is_movable for math in self.maths.values())

    @property
    def is_in_slots(self) -> bool:
        """Whether GPU kernels compute few tokens directly from the experts in slots."""
        return bool(self.maths) and all(math.kernels.slots is not None for math in self.maths.values())

    @property
    def arithmetic(self) -> str:
        """The kernels that multiply few rows. One of `KERNELS`: torch, native (our kernels with torch's bits) or
        own-order (our kernels, grade E1)."""
        pool = self.spinning_pool
        return "torch" if pool is None else "native" if pool.own_order is None else "own-order"

    @property
    def activations(self) -> str:
        """The type to which activation rows are rounded before quantized experts multiply them: `INT8` or `BF16`."""
        return INT8 if any(math.rounds_rows for math in self.maths.values()) else BF16


def _token_kernel(maths: Sequence[ExpertMath]) -> TokenExperts | None:
    usable = all(
        math.kernels.token is not None and math.kernels.slots is None and not math.sums_as_weights for math in maths
    )
    return maths[0].kernels.token if usable else None


def _adapt_nothing(has_readers: bool, is_prompt: bool) -> None:
    """Do nothing. This function replaces `SpinningPool.adapt` if the library computes, because smoe does not control
    the library's threads."""
