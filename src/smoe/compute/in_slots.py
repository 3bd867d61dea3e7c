"""Computes few tokens through experts in the slots of a GPU, by kernels that take the experts' addresses
(`gpu_kernels/`).

The host copies a table of addresses to the device and launches kernels:

    resident experts    one launch for all of them; if no other expert is missing, it also computes the layer's sum
    each late expert    one launch after the event of its copy; the host does not wait; the last one includes the sum
                        (small experts: one launch for all whose copies have been requested)

Every route has a float32 row of its own, whichever launch writes it. The sum adds a token's rows in ascending order of
experts. So the bits depend neither on residency nor on the time of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smoe.compute.expert_math import Weights
from smoe.gpu_kernels.slot_experts import Entry, Layer, SlotExperts
from smoe.memory.streams import on_device

NONE = -1
"""The entry that means "no expert" in the order of a sum."""


class InSlots:
    """The computation of one layer's experts on a GPU (`DecodeExperts`). The host never waits for the device."""

    def __init__(
        self,
        kernels: Sequence[SlotExperts],
        hidden: torch.Tensor,
        top_k_weights: torch.Tensor,
        routes: Sequence[Sequence[int]],
        by_token: Sequence[Sequence[int]],
    ) -> None:
        """`kernels` and `routes`: one entry for each expert; `by_token`: for each token, its routes in the order of the
        sum."""
        self._kernels = kernels
        self._routes = routes
        self._by_token = by_token
        self._most = max(map(len, routes))
        gains = top_k_weights.contiguous()
        self._layer = Layer.of(kernels[0].kind, hidden.contiguous(), gains, _order(by_token, gains))
        self._open = len(routes)
        """The number of experts whose output rows are still missing."""

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
    """Return each token's routes as int64 [T, K], where rows with fewer routes are padded with `NONE`. K is the width
    of `weights` [T, K]."""
    width = weights.shape[1]
    flat = [route for routes in by_token for route in (*routes, *[NONE] * (width - len(routes)))]
    return on_device(flat, weights.device)
