"""Computes few tokens through the experts of a layer, by one of three methods: torch's operations, one call of our CPU
kernel, or GPU kernels that read the slots (`in_slots.py`).

Every method stores each expert's output separately and adds the outputs at the end in ascending order of experts, in
whatever order the experts arrived. So a result never depends on residency. torch sums in another order for several rows
than for one. Our kernel computes an expert that several of the tokens chose only if it has that order too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple, Protocol, TypeAlias

import torch

from smoe.compute.expert_math import ExpertMath, Weights, add_rows, empty_sum
from smoe.compute.in_slots import InSlots
from smoe.compute.thread_pool import ThreadPool
from smoe.gpu_kernels.source import MOST_TOKENS as MOST_IN_SLOTS
from smoe.kernels.expert_work import Expert
from smoe.kernels.experts import MOST_EXPERTS, MOST_TOKENS, Sums, TokenExperts
from smoe.kernels.spinning_pool import SpinningPool
from smoe.memory.streams import on_device
from smoe.policy.plan import Serve

_PROOF_EXPERTS = 8

Routes = Sequence[Sequence[int]]
"""For every expert, in the order of the plan, its flat positions t * K + k in the choice [T, K]."""


class ChosenExperts(NamedTuple):
    """The experts of one layer that T tokens have chosen, in the order of the layer's plan."""

    maths: Sequence[ExpertMath]
    """The arithmetic of each expert's copy."""
    hidden: torch.Tensor
    """[T, H]"""
    top_k_weights: torch.Tensor
    """[T, K]"""
    routes: Routes
    ascending: Sequence[int]
    """The experts' numbers in the order of the sum."""

    @property
    def routes_by_token(self) -> list[list[int]]:
        """For every token its routes, ordered by ascending expert, which is the order of the sum."""
        tokens, width = self.top_k_weights.shape
        if tokens == 1:
            return [[route for n in self.ascending for route in self.routes[n]]]
        found: list[list[int]] = [[] for _ in range(tokens)]
        for n in self.ascending:
            for route in self.routes[n]:
                found[route // width].append(route)
        return found


class DecodeExperts(Protocol):
    """The computation of one layer's experts for T tokens. The experts are computed in the order of the layer's
    plan."""

    def compute(self, first: int, weights: Sequence[Weights]) -> None:
        """Compute consecutive experts, from number `first` of the plan on. `weights` has one entry for each of these
        experts."""

    def put(self, n: int, rows: torch.Tensor) -> None:
        """Store the outputs of the plan's expert number `n`, which another device or machine has computed: [number of
        its routes, H], not yet multiplied by the routing weights."""

    def partial(self, count: int) -> torch.Tensor:
        """Return the weighted sum of the outputs of the plan's first `count` experts [T, H]. It is only for
        predictions: its last bits may differ from those of `total`."""

    def total(self) -> torch.Tensor:
        """Return the weighted sum of the outputs of all experts of the layer, [T, H]."""


Way: TypeAlias = Callable[[ChosenExperts], DecodeExperts]
"""A function that begins a layer's experts."""


Begin: TypeAlias = Callable[[Sequence[Serve], torch.Tensor, torch.Tensor], DecodeExperts]
"""A function (serves, hidden [T, H], top_k_weights [T, K]) that begins a layer's experts, in the order of the
serves."""


def begin_of(maths: Mapping[int, ExpertMath], thread_pool: ThreadPool | None) -> Begin:
    """Return a function that begins the computation of a layer's experts for few tokens. `maths`: the arithmetic of the
    layer's experts, by format of the weights."""
    way = way_of(list(maths.values()), thread_pool)

    def begin(serves: Sequence[Serve], hidden: torch.Tensor, top_k_weights: torch.Tensor) -> DecodeExperts:
        ascending = sorted(range(len(serves)), key=lambda n: serves[n].key)
        routes = [serve.routes for serve in serves]
        own = [maths[serve.key[2]] for serve in serves]
        return way(ChosenExperts(own, hidden, top_k_weights, routes, ascending))

    return begin


def way_of(maths: Sequence[ExpertMath], thread_pool: ThreadPool | None) -> Way:
    """Return the class that computes a layer's experts for few tokens. The choice depends on the kernels that `maths`,
    the arithmetic of all the layer's formats, can use."""
    if all(math.kernels.slots is not None for math in maths):
        return _in_slots
    if all(math.kernels.token is not None and not math.sums_as_weights for math in maths):
        return _in_one_piece
    return partial(_by_operations, thread_pool)


def _in_slots(chosen: ChosenExperts) -> DecodeExperts:
    if chosen.hidden.shape[0] > MOST_IN_SLOTS:
        return _by_operations(None, chosen)
    kernels = [math.kernels.slots for math in chosen.maths if math.kernels.slots is not None]
    return InSlots(kernels, chosen.hidden, chosen.top_k_weights, chosen.routes, chosen.routes_by_token)


def _in_one_piece(chosen: ChosenExperts) -> DecodeExperts:
    if chosen.hidden.shape[0] > MOST_TOKENS:
        return _by_operations(None, chosen)
    return _InOnePiece(chosen, [math.kernels.token for math in chosen.maths if math.kernels.token is not None])


def _by_operations(thread_pool: ThreadPool | None, chosen: ChosenExperts) -> DecodeExperts:
    if chosen.hidden.shape[0] == 1 and all(len(some) == 1 for some in chosen.routes):
        return _OneByOperations(chosen, thread_pool)
    return _SeveralByOperations(chosen)


def routes_on_device(routes: Routes, width: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for every expert its routes [n] and the tokens of these routes [n], as tensors on the device. One transfer
    copies the routes of all experts."""
    flat = on_device([route for some in routes for route in some], device)
    counts = [len(some) for some in routes]
    return list(zip(flat.split(counts), (flat // width).split(counts), strict=True))


def proven_kernel(math: ExpertMath, pool: SpinningPool, weights: Weights) -> TokenExperts | None:
    """Return the kernel that computes one token through experts with this arithmetic, or None if a test finds that its
    results are not torch's."""
    math = math.by_pool(pool)
    kernel = math.kernel_of(pool)
    if kernel is None:
        return None
    x = torch.randn(1, math.hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    gains, order = torch.rand(1, _PROOF_EXPERTS).to(torch.bfloat16), range(_PROOF_EXPERTS)
    chosen = ChosenExperts([math] * _PROOF_EXPERTS, x, gains, [[n] for n in order], order)
    ours = _InOnePiece(chosen, [kernel] * _PROOF_EXPERTS)
    theirs = _OneByOperations(chosen, None)
    for way in (ours, theirs):
        way.compute(0, [weights] * _PROOF_EXPERTS)
    if not math.is_proof(pool, ours.total(), theirs.total()):
        return None
    return math.kernel_of(pool, math.most_rows(pool, weights))


class _OneByOperations:
    """Computes one token through its experts by torch's operations, on the threads of a pool if there is one."""

    def __init__(self, chosen: ChosenExperts, thread_pool: ThreadPool | None) -> None:
        self._maths, hidden, top_k_weights, routes, self._ascending = chosen
        self._thread_pool = thread_pool
        self._hidden = hidden
        taken = on_device([route for (route,) in routes], hidden.device)
        self._gains = top_k_weights[0].index_select(0, taken).unsqueeze(1)
        self._stacked = hidden.new_empty(len(routes), hidden.shape[1])

    def compute(self, first: int, weights: Sequence[Weights]) -> None:
        begin = 0
        for math, alike in groupby(self._maths[first : first + len(weights)]):
            end = begin + sum(1 for _ in alike)
            self._run(math, weights[begin:end], self._stacked[first + begin : first + end])
            begin = end

    def _run(self, math: ExpertMath, weights: Sequence[Weights], out: torch.Tensor) -> None:
        hidden = self._hidden
        if self._thread_pool is not None and len(weights) > 1:
            self._thread_pool.run(lambda member, of: math.forward_each(hidden, weights[member::of], out[member::of]))
        else:
            math.forward_each(hidden, weights, out)

    def put(self, n: int, rows: torch.Tensor) -> None:
        self._stacked[n : n + 1].copy_(rows)

    def partial(self, count: int) -> torch.Tensor:
        return (self._stacked[:count] * self._gains[:count]).to(self._hidden.dtype).sum(0, keepdim=True)

    def total(self) -> torch.Tensor:
        total = empty_sum(self._maths[0], self._hidden, self._gains)
        outputs = (self._stacked * self._gains).to(total.dtype).split(1)
        for n in self._ascending:
            total += outputs[n]
        return total.to(self._hidden.dtype)


class _SeveralByOperations:
    """Computes several tokens through their experts by torch's operations, one expert after the other."""

    def __init__(self, chosen: ChosenExperts) -> None:
        self._maths, hidden, top_k_weights, routes, self._ascending = chosen
        self._hidden = hidden
        self._gains = top_k_weights.reshape(-1, 1)
        self._routes = routes_on_device(routes, top_k_weights.shape[1], hidden.device)
        """Every expert's routes and their tokens."""
        self._outputs: list[torch.Tensor | None] = [None] * len(routes)

    def compute(self, first: int, weights: Sequence[Weights]) -> None:
        for n, one in enumerate(weights, start=first):
            self.put(n, self._maths[n].forward(self._hidden[self._routes[n][1]], one))

    def put(self, n: int, rows: torch.Tensor) -> None:
        self._outputs[n] = rows * self._gains[self._routes[n][0]]

    def partial(self, count: int) -> torch.Tensor:
        return self.total()  # missing outputs are left out

    def total(self) -> torch.Tensor:
        total = empty_sum(self._maths[0], self._hidden, self._gains)
        for n in self._ascending:
            output = self._outputs[n]
            if output is not None:
                add_rows(total, self._routes[n][1], output.to(total.dtype))
        return total.to(self._hidden.dtype)


class _InOnePiece:
    """Computes few tokens through their experts by our kernel. It adds the outputs right after the last expert, without
    returning to Python.

    Output rows are ordered by token, and those of a token by ascending expert.
    """

    def __init__(self, chosen: ChosenExperts, kernels: Sequence[TokenExperts]) -> None:
        """`kernels`: one for each expert."""
        self._maths, hidden, top_k_weights, routes, _ = chosen
        self._kernels = kernels
        self._kernel = kernels[0]
        """The kernel for copies of all formats. Kernels of different formats differ only in the number of rows that
        they allow; the matrices are arguments."""
        self._hidden = hidden.contiguous()
        width = top_k_weights.shape[1]
        given = top_k_weights.flatten().tolist()
        ordered = chosen.routes_by_token
        row_of = {route: row for row, route in enumerate([route for token in ordered for route in token])}
        self._places = [[(route // width, row_of[route]) for route in some] for some in routes]
        """For each expert, its routes in their order, each as (token, row of the outputs)."""
        self._gains = [given[route] for route in row_of]
        spans = [(row_of[token[0]] if token else 0, len(token)) for token in ordered]
        self._rows = hidden.new_empty(len(self._gains), hidden.shape[1])
        self._out = torch.zeros_like(self._hidden)
        self._sums = Sums(self._gains, spans, self._out)
        self._open = len(routes)

    def compute(self, first: int, weights: Sequence[Weights]) -> None:
        ours: list[Expert] = []
        for n, one in enumerate(weights, start=first):
            places = self._places[n]
            kernel = self._kernels[n]
            if len(places) <= kernel.most_rows or kernel.pool.rows_are_alone:
                ours.append(Expert(one.matrices, places))
            else:
                tokens, rows = (list(part) for part in zip(*places, strict=True))
                self._rows[rows] = self._maths[n].forward(self._hidden[tokens], one)
        self._end(len(weights), ours)

    def put(self, n: int, rows: torch.Tensor) -> None:
        self._rows[[row for _, row in self._places[n]]] = rows
        self._end(1, [])

    def _end(self, count: int, ours: list[Expert]) -> None:
        """Compute the experts `ours`, which completes `count` experts of the layer. After the last expert of the layer,
        also compute the sum."""
        self._open -= count
        while len(ours) > MOST_EXPERTS:
            self._kernel.forward(self._hidden, ours[:MOST_EXPERTS], self._rows)
            ours = ours[MOST_EXPERTS:]
        if ours or not self._open:
            self._kernel.forward(self._hidden, ours, self._rows, None if self._open else self._sums)

    def partial(self, count: int) -> torch.Tensor:
        places = [place for places in self._places[:count] for place in places]
        rows = [row for _, row in places]
        gains = torch.tensor([self._gains[row] for row in rows], dtype=torch.float32).unsqueeze(1)
        tokens = torch.tensor([token for token, _ in places], dtype=torch.long)
        total = torch.zeros(self._hidden.shape, dtype=torch.float32)
        add_rows(total, tokens, self._rows[rows] * gains)
        return total.to(self._hidden.dtype)

    def total(self) -> torch.Tensor:
        return self._out
