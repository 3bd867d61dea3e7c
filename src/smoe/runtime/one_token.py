"""One token through the experts of a layer: operation by operation with the library, or in one piece with our kernel.

Both keep every expert's output apart and add them up at the end in ascending expert order, whatever the order of
arrival, so a result never depends on residency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from smoe.kernels.crew import Crew
from smoe.kernels.experts import MOST_EXPERTS, Expert, TokenExperts
from smoe.runtime.expert_math import ExpertMath, Weights
from smoe.runtime.team import Team

_PROOF_EXPERTS = 8


class OneToken(Protocol):
    """The experts of one layer and one token, n of them, computed in the order of the plan."""

    def compute(self, first: int, weights: Sequence[Weights]) -> None:
        """The experts number `first` and following."""

    def put(self, n: int, row: torch.Tensor) -> None:
        """Expert number n was computed elsewhere: [1, H], before its routing weight."""

    def partial(self, count: int) -> torch.Tensor:
        """What the first `count` experts have given: [1, H]; its last bits are nobody's."""

    def total(self) -> torch.Tensor:
        """The sum of all: [1, H]."""


def one_token(
    math: ExpertMath,
    team: Team | None,
    hidden: torch.Tensor,
    top_k_weights: torch.Tensor,
    routes: Sequence[int],
    ascending: Sequence[int],
) -> OneToken:
    """hidden [1, H], top_k_weights [1, K]; `routes`: each expert's k; `ascending`: the experts in the sum's order."""
    if math.kernel is not None and len(routes) <= MOST_EXPERTS:
        return _InOnePiece(math.kernel, hidden, top_k_weights, routes, ascending)
    return _ByOperations(math, team, hidden, top_k_weights, routes, ascending)


def proven_kernel(math: ExpertMath, crew: Crew, weights: Weights) -> TokenExperts | None:
    """The kernel that takes one token through these experts, if it gives the library's bits on this one of them."""
    kernel = math.kernel_of(crew)
    if kernel is None:
        return None
    x = torch.randn(1, math.hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    gains, order = torch.rand(1, _PROOF_EXPERTS).to(torch.bfloat16), range(_PROOF_EXPERTS)
    ways = (_InOnePiece(kernel, x, gains, order, order), _ByOperations(math, None, x, gains, order, order))
    for way in ways:
        way.compute(0, [weights] * _PROOF_EXPERTS)
    return kernel if torch.equal(ways[0].total(), ways[1].total()) else None


class _ByOperations:
    """By the library's operations, shared out over a team of threads where there is one."""

    def __init__(
        self,
        math: ExpertMath,
        team: Team | None,
        hidden: torch.Tensor,
        top_k_weights: torch.Tensor,
        routes: Sequence[int],
        ascending: Sequence[int],
    ) -> None:
        self._math = math
        self._team = team
        self._hidden = hidden
        self._ascending = ascending
        self._gains = top_k_weights[0, list(routes)].unsqueeze(1)
        self._stacked = hidden.new_empty(len(routes), hidden.shape[1])

    def compute(self, first: int, weights: Sequence[Weights]) -> None:
        math, hidden, out = self._math, self._hidden, self._stacked[first : first + len(weights)]
        if self._team is not None and len(weights) > 1:
            self._team.run(lambda member, of: math.forward_each(hidden, weights[member::of], out[member::of]))
        elif weights:
            math.forward_each(hidden, weights, out)

    def put(self, n: int, row: torch.Tensor) -> None:
        self._stacked[n : n + 1].copy_(row)

    def partial(self, count: int) -> torch.Tensor:
        return (self._stacked[:count] * self._gains[:count]).to(self._hidden.dtype).sum(0, keepdim=True)

    def total(self) -> torch.Tensor:
        total = torch.zeros_like(self._hidden)
        outputs = (self._stacked * self._gains).to(self._hidden.dtype).split(1)
        for n in self._ascending:
            total += outputs[n]
        return total


class _InOnePiece:
    """By our kernel; the sum follows the last expert without coming back to Python."""

    def __init__(
        self,
        kernel: TokenExperts,
        hidden: torch.Tensor,
        top_k_weights: torch.Tensor,
        routes: Sequence[int],
        ascending: Sequence[int],
    ) -> None:
        self._kernel = kernel
        self._hidden = hidden.contiguous()
        given = top_k_weights[0].tolist()
        self._gains = [given[routes[n]] for n in ascending]
        self._row = [0] * len(routes)
        for row, n in enumerate(ascending):
            self._row[n] = row
        self._rows = hidden.new_empty(len(routes), hidden.shape[1])
        self._out = torch.empty_like(self._hidden)
        self._open = len(routes)

    def compute(self, first: int, weights: Sequence[Weights]) -> None:
        if not weights:
            return
        self._open -= len(weights)
        experts = [Expert(self._row[first + n], one.up, one.down) for n, one in enumerate(weights)]
        total = (self._gains, self._out) if self._open == 0 else None
        self._kernel.forward(self._hidden, experts, self._rows, total)

    def put(self, n: int, row: torch.Tensor) -> None:
        self._rows[self._row[n] : self._row[n] + 1].copy_(row)
        self._open -= 1
        if self._open == 0:
            self._kernel.forward(self._hidden, [], self._rows, (self._gains, self._out))

    def partial(self, count: int) -> torch.Tensor:
        rows = self._row[:count]
        gains = torch.tensor([self._gains[row] for row in rows]).unsqueeze(1)
        return (self._rows[rows] * gains).sum(0, keepdim=True).to(self._hidden.dtype)

    def total(self) -> torch.Tensor:
        return self._out
