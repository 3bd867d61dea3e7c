"""Launch the kernels for experts in slots, and allocate their outputs; the host never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from smoe.gpu_kernels.compiled import Kernels, kernels_of
from smoe.gpu_kernels.source import COUNTED, MOST_EXPERTS, MOST_TOKENS, ExpertKind, Tile, sum_tasks, tasks_of, tile_for
from smoe.memory.streams import on_device


class Entry(NamedTuple):
    """One expert of a kernel launch."""

    addresses: Sequence[int]
    """The addresses of its matrices and biases, in the order of `ExpertKind`."""
    routes: Sequence[int]
    """Its flat positions t * K + k in the choice [T, K]."""


class Table(NamedTuple):
    """The experts of one launch, as the kernel reads them (`source.py`)."""

    numbers: torch.Tensor
    """All entries: int64."""
    experts: int
    tokens: int
    """The number of tokens that an entry has room for."""


class Layer(NamedTuple):
    """The tensors that all launches of a layer read and write, except its experts."""

    x: torch.Tensor
    """The hidden states [T, H]."""
    inner: torch.Tensor
    """The values of every route between the products: float32 [T * K, I]."""
    rows: torch.Tensor
    """The outputs of every route: float32 [T * K, H]."""
    weights: torch.Tensor
    """The routing weights [T, K]."""
    order: torch.Tensor
    """The routes of every token in the order of the sum: int64 [T, K]; -1 for none."""
    out: torch.Tensor
    """The sum [T, H], after the launch that computes it."""

    @classmethod
    def of(cls, kind: ExpertKind, x: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> Layer:
        """Allocate the tensors for a layer's results."""
        routes = weights.numel()
        inner = x.new_empty(routes, kind.inner, dtype=torch.float32)
        rows = x.new_empty(routes, kind.hidden, dtype=torch.float32)
        return cls(x, inner, rows, weights, order, torch.empty_like(x))


class SlotExperts:
    """The kernels for experts of one kind. Launches must be consecutive in one stream, because they share task
    counters."""

    def __init__(self, kind: ExpertKind, tile: Tile | None = None) -> None:
        """`tile`: the part of a matrix that a task reads at a time; None for the default."""
        self.kind = kind
        self._tile = tile
        self._steps = [(n, each.alignment) for n, each in enumerate((*kind.ups, kind.down)) if each.alignment > 1]
        self._made: dict[int, Kernels] = {}
        """The kernels by the number of tokens that an entry has room for."""
        self._counts: dict[torch.device, torch.Tensor] = {}

    def multiply(self, layer: Layer, entries: Sequence[Entry], most: int, *, has_sum: bool) -> None:
        """Compute some experts of a layer, and with `has_sum` also the sum of all rows: one launch and one small copy
        to the device.

        `most` is the largest number of routes of any expert of the layer, in any launch; an expert's bits depend on it.
        More than `MOST_EXPERTS` entries need several launches.
        """
        for first in range(0, len(entries), MOST_EXPERTS):
            some = entries[first : first + MOST_EXPERTS]
            is_last = first + MOST_EXPERTS >= len(entries)
            self.launch(layer, self.table(layer, some, most), has_sum=has_sum and is_last)

    def table(self, layer: Layer, entries: Sequence[Entry], most: int) -> Table:
        """Return the arguments of one launch, in the device's memory."""
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
        """Compute only the sum of existing rows, with one launch."""
        grid = len(layer.out), sum_tasks(self.kind, 1)
        with _chosen(layer.out.device):
            self._kernels(1).weighted_sum[grid](*layer[2:], layer.weights.shape[1], self.kind.hidden)

    def _counts_on(self, device: torch.device) -> torch.Tensor:
        """Return the task counters of a device, which are zero between launches."""
        if device not in self._counts:
            self._counts[device] = torch.zeros(COUNTED, dtype=torch.int32, device=device)
        return self._counts[device]

    def _kernels(self, tokens: int) -> Kernels:
        if tokens not in self._made:
            self._made[tokens] = kernels_of(self.kind, tokens, self._tile)
        return self._made[tokens]


def _chosen(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that selects the device, because Triton launches on torch's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def padded(most: int) -> int:
    """Return the number of tokens that entries have room for: 1, 2, 4 or 8."""
    assert 0 < most <= MOST_TOKENS, most
    return 1 << (most - 1).bit_length()
