"""Few tokens through experts in the slots of a GPU, by kernels that are given addresses (`gpu_kernels/`).

    for what is here     table -> device    experts, sum     all experts that are resident, in one launch; where that
                                                             is all of them, the layer's sum, too
    for each late one    table -> device    expert, sum      behind the mark of its copy; the host goes on at once;
                                                             the last one's launch has the sum

Every route has a row of its own, in float32, whichever launch wrote it; the sum takes a token's rows in ascending
expert order. So no bit depends on who was resident, nor on when the others came.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smoe.compute.expert_math import ExpertMath, Weights
from smoe.gpu_kernels.slot_experts import Entry, Layer, SlotExperts
from smoe.gpu_kernels.source import MOST_TOKENS
from smoe.memory.streams import on_device

NONE = -1
"""The entry of a sum's order for no expert."""


def kernels_for(maths: Sequence[ExpertMath], tokens: int) -> list[SlotExperts] | None:
    """What takes so many tokens through the experts that `maths` compute; None where something else must."""
    kernels = [math.slots for math in maths if math.slots is not None]
    return kernels if kernels and len(kernels) == len(maths) and tokens <= MOST_TOKENS else None


class InSlots:
    """The experts of one layer (`DecodeExperts`). Waits for nothing."""

    def __init__(
        self,
        kernels: Sequence[SlotExperts],
        hidden: torch.Tensor,
        top_k_weights: torch.Tensor,
        routes: Sequence[Sequence[int]],
        by_token: Sequence[Sequence[int]],
    ) -> None:
        """`kernels` and `routes` of every expert; `by_token`: of every token, its routes in the order of the sum."""
        self._kernels = kernels
        self._routes = routes
        self._by_token = by_token
        self._most = max(map(len, routes))
        gains = top_k_weights.contiguous()
        self._layer = Layer.of(kernels[0].kind, hidden.contiguous(), gains, _order(by_token, gains))
        self._open = len(routes)
        """Experts of which no rows are there yet."""

    def compute(self, first: int, weights: Sequence[Weights]) -> None:
        launches: dict[SlotExperts, list[Entry]] = {}
        for n, one in enumerate(weights, start=first):
            launches.setdefault(self._kernels[n], []).append(Entry(one.addresses, self._routes[n]))
        for kernel, entries in launches.items():
            self._open -= len(entries)
            kernel.multiply(self._layer, entries, self._most, has_sum=not self._open)

    def put(self, n: int, rows: torch.Tensor) -> None:
        self._layer.rows.index_copy_(0, on_device(self._routes[n], rows.device), rows.float())
        self._open -= 1
        if not self._open:
            self._kernels[0].sum(self._layer)

    def partial(self, count: int) -> torch.Tensor:
        there = {route for routes in self._routes[:count] for route in routes}
        by_token = [[route for route in routes if route in there] for routes in self._by_token]
        some = self._layer._replace(order=_order(by_token, self._layer.weights), out=torch.empty_like(self._layer.out))
        self._kernels[0].sum(some)
        return some.out

    def total(self) -> torch.Tensor:
        return self._layer.out


def _order(by_token: Sequence[Sequence[int]], weights: torch.Tensor) -> torch.Tensor:
    """The routes of every token, with `NONE` up to the width of weights [T, K]: int64 [T, K]."""
    width = weights.shape[1]
    flat = [route for routes in by_token for route in (*routes, *[NONE] * (width - len(routes)))]
    return on_device(flat, weights.device)
