"""Few tokens through experts in the slots of a GPU, by kernels that are given addresses (`gpu_kernels/`).

    for what is here     table -> device    up    down         all experts that are resident, in two launches
    for each late one    table -> device    up    down         behind the mark of its copy; the host goes on at once
    in the end                              sum                one launch

Every route has a row of its own, in float32, whichever launch wrote it; the sum takes a token's rows in ascending
expert order. So no bit depends on who was resident, nor on when the others came.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smoe.compute.expert_math import ExpertMath, Weights
from smoe.gpu_kernels.slot_experts import Entry, Scratch, SlotExperts
from smoe.gpu_kernels.source import MOST_TOKENS
from smoe.memory.streams import on_device

NONE = -1
"""In the order of a sum: nothing."""


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
        self._hidden = hidden.contiguous()
        self._gains = top_k_weights.contiguous()
        self._routes = routes
        self._by_token = by_token
        self._most = max(map(len, routes))
        self._scratch = Scratch.of(kernels[0].kind, top_k_weights.numel(), hidden.device)

    def compute(self, first: int, weights: Sequence[Weights]) -> None:
        launches: dict[SlotExperts, list[Entry]] = {}
        for n, one in enumerate(weights, start=first):
            launches.setdefault(self._kernels[n], []).append(Entry(one.addresses, self._routes[n]))
        for kernel, entries in launches.items():
            kernel.multiply(self._hidden, entries, self._gains.shape[1], self._most, self._scratch)

    def put(self, n: int, rows: torch.Tensor) -> None:
        self._scratch.rows.index_copy_(0, on_device(self._routes[n], rows.device), rows.float())

    def partial(self, count: int) -> torch.Tensor:
        there = {route for routes in self._routes[:count] for route in routes}
        return self._sum([[route for route in routes if route in there] for routes in self._by_token])

    def total(self) -> torch.Tensor:
        return self._sum(self._by_token)

    def _sum(self, by_token: Sequence[Sequence[int]]) -> torch.Tensor:
        width = self._gains.shape[1]
        order = on_device(
            [n for routes in by_token for n in (*routes, *[NONE] * (width - len(routes)))], self._gains.device
        )
        out = torch.empty_like(self._hidden)
        self._kernels[0].sum(self._scratch, self._gains, order, out)
        return out
