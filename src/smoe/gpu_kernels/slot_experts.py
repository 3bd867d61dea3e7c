"""Launches the kernels for experts in slots, and allocates their outputs. The host never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from smoe.gpu_kernels.compiled import Kernels, kernels_of
from smoe.gpu_kernels.source import COUNTED, MOST_EXPERTS, MOST_TOKENS, ExpertKind, Tile, sum_tasks, tasks_of, tile_for
from smoe.memory.streams import on_device


class Entry(NamedTuple):
    """One expert in a kernel launch: the addresses of its weights, and the routes to it."""

    addresses: Sequence[int]
    """The addresses of the expert's matrices and biases, in the order of `ExpertKind`."""
    routes: Sequence[int]
    """The routes to the expert: flat positions t * K + k in the router's choice [T, K]."""


class Table(NamedTuple):
    """The description of all experts in one kernel launch, as a tensor that the kernel reads (`source.py`)."""

    numbers: torch.Tensor
    """The numbers of all entries, int64, in the device's memory."""
    experts: int
    tokens: int
    """The number of tokens for which an entry has room."""


class Layer(NamedTuple):
    """The tensors, apart from experts, that all launches of one layer read and write. T tokens, K experts of each,
    hidden size H, inner size I."""

    x: torch.Tensor
    """The hidden states [T, H]."""
    inner: torch.Tensor
    """The values between the two products, for every route: float32 [T * K, I]."""
    rows: torch.Tensor
    """The outputs of the experts, for every route: float32 [T * K, H]."""
    weights: torch.Tensor
    """The routing weights [T, K]."""
    order: torch.Tensor
    """The routes of every token in the order of the sum: int64 [T, K], where -1 means no route."""
    out: torch.Tensor
    """The weighted sum [T, H], valid after the launch that computes it."""

    @classmethod
    def of(cls, kind: ExpertKind, x: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> Layer:
        """Return the tensors of a layer, with newly allocated tensors for the results."""
        routes = weights.numel()
        inner = x.new_empty(routes, kind.inner, dtype=torch.float32)
        rows = x.new_empty(routes, kind.hidden, dtype=torch.float32)
        return cls(x, inner, rows, weights, order, torch.empty_like(x))


class SlotExperts:
    """The GPU kernels for experts of one kind. All launches must be in one stream, because they share task counters."""

    def __init__(self, kind: ExpertKind, tile: Tile | None = None) -> None:
        """`tile`: the part of a matrix that a task reads at a time; None: a default."""
        self.kind = kind
        self._tile = tile
        self._steps = [(n, each.alignment) for n, each in enumerate((*kind.ups, kind.down)) if each.alignment > 1]
        self._made: dict[int, Kernels] = {}
        """The compiled kernels, by the number of tokens for which an entry has room."""
        self._counts: dict[torch.device, torch.Tensor] = {}

    def multiply(self, layer: Layer, entries: Sequence[Entry], most: int, *, has_sum: bool) -> None:
        """Compute experts of a layer, and with `has_sum` also the weighted sum. Takes one launch and one small copy to
        the device.

        `most`: the largest number of routes of any expert of this layer, in any launch; an expert's bits depend on it.
        More than `MOST_EXPERTS` entries take several launches.
        """
        for first in range(0, len(entries), MOST_EXPERTS):
            some = entries[first : first + MOST_EXPERTS]
            is_last = first + MOST_EXPERTS >= len(entries)
            self.launch(layer, self.table(layer, some, most), has_sum=has_sum and is_last)

    def table(self, layer: Layer, entries: Sequence[Entry], most: int) -> Table:
        """Return the table that describes the experts of one launch, in the device's memory."""
        assert not any(each.addresses[n] % step for each in entries for n, step in self._steps), "not aligned"
        tokens, width, numbers = padded(most), layer.weights.shape[1], list[int]()
        for addresses, routes in entries:
            none = tokens - len(routes)
            numbers += addresses
            numbers += [*routes, *[-1] * none, *(route // width for route in routes), *[0] * none]
        return Table(on_device(numbers, layer.x.device), len(entries), tokens)

    def launch(self, layer: Layer, table: Table, *, has_sum: bool) -> None:
        """Launch the kernel for at most `MOST_EXPERTS` experts."""
        numbers, experts, tokens = table
        assert experts <= MOST_EXPERTS, experts
        tile, device = self._tile or tile_for(tokens), layer.x.device
        programs = experts * sum(tasks_of(self.kind, tile)) + has_sum * sum_tasks(self.kind, len(layer.out))
        arguments = numbers, *layer, self._counts_on(device), experts, programs, layer.weights.shape[1]
        with _chosen(device):
            self._kernels(tokens).experts_of[programs,](*arguments, num_warps=tile.warps)

    def sum(self, layer: Layer) -> None:
        """Compute only the weighted sum of expert outputs that earlier launches have stored, with one launch."""
        grid = len(layer.out), sum_tasks(self.kind, 1)
        with _chosen(layer.out.device):
            self._kernels(1).weighted_sum[grid](*layer[2:], layer.weights.shape[1], self.kind.hidden)

    def _counts_on(self, device: torch.device) -> torch.Tensor:
        """Return the task counters on a device. They are zero between launches."""
        if device not in self._counts:
            self._counts[device] = torch.zeros(COUNTED, dtype=torch.int32, device=device)
        return self._counts[device]

    def _kernels(self, tokens: int) -> Kernels:
        if tokens not in self._made:
            self._made[tokens] = kernels_of(self.kind, tokens, self._tile)
        return self._made[tokens]


def _chosen(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is torch's current device, on which Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def padded(most: int) -> int:
    """Return the number of tokens per expert, 1, 2, 4 or 8, for which a kernel is generated if no expert has more than
    `most` tokens."""
    assert 0 < most <= MOST_TOKENS, most
    return 1 << (most - 1).bit_length()
