"""Launches of the kernels for experts in slots, and what they write into: nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from smoe.gpu_kernels.compiled import Kernels, kernels_of
from smoe.gpu_kernels.source import COUNTED, MOST_EXPERTS, MOST_TOKENS, ExpertKind, Tile, sum_tasks, tasks_of, tile_for
from smoe.memory.streams import on_device


class Entry(NamedTuple):
    """One expert of a launch."""

    addresses: Sequence[int]
    """Of its matrices and biases, in the order of `ExpertKind`."""
    routes: Sequence[int]
    """Its flat positions t * K + k in the choice [T, K]."""


class Table(NamedTuple):
    """The experts of one launch, as the kernel reads them (`source.py`)."""

    numbers: torch.Tensor
    """int64 [numbers of all entries]"""
    experts: int
    tokens: int
    """That an entry has room for."""


class Layer(NamedTuple):
    """What all launches of a layer read and write, besides its experts."""

    x: torch.Tensor
    """[T, H]"""
    inner: torch.Tensor
    """float32 [T * K, I]: what every route gives between the products."""
    rows: torch.Tensor
    """float32 [T * K, H]: what every route gives."""
    weights: torch.Tensor
    """[T, K]"""
    order: torch.Tensor
    """int64 [T, K]: the routes of every token in the order of the sum, -1: none."""
    out: torch.Tensor
    """[T, H]: the sum, where a launch has made it."""

    @classmethod
    def of(cls, kind: ExpertKind, x: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> Layer:
        """With room for what is written."""
        routes = weights.numel()
        inner = x.new_empty(routes, kind.inner, dtype=torch.float32)
        rows = x.new_empty(routes, kind.hidden, dtype=torch.float32)
        return cls(x, inner, rows, weights, order, torch.empty_like(x))


class SlotExperts:
    """The kernels for experts of one kind. Launches follow each other in a stream: they share what counts tasks."""

    def __init__(self, kind: ExpertKind, tile: Tile | None = None) -> None:
        """`tile`: what tasks work on at a time, where it is not what we have chosen."""
        self.kind = kind
        self._tile = tile
        self._steps = [(n, each.alignment) for n, each in enumerate((*kind.ups, kind.down)) if each.alignment > 1]
        self._made: dict[int, Kernels] = {}
        """By the tokens that an entry has room for."""
        self._counts: dict[torch.device, torch.Tensor] = {}

    def multiply(self, layer: Layer, entries: Sequence[Entry], most: int, *, has_sum: bool) -> None:
        """Some experts of a layer, and where it `has_sum` the sum of all rows that are there then: one launch, and one
        small copy to the device.

        `most`: routes of any expert of the whole layer at most, whichever launch it is in; an expert's bits depend on
        it. More than `MOST_EXPERTS` entries take several launches.
        """
        for first in range(0, len(entries), MOST_EXPERTS):
            some = entries[first : first + MOST_EXPERTS]
            is_last = first + MOST_EXPERTS >= len(entries)
            self.launch(layer, self.table(layer, some, most), has_sum=has_sum and is_last)

    def table(self, layer: Layer, entries: Sequence[Entry], most: int) -> Table:
        """The arguments of one launch, in the device's memory."""
        assert not any(each.addresses[n] % step for each in entries for n, step in self._steps), "not aligned"
        tokens, width, numbers = padded(most), layer.weights.shape[1], list[int]()
        for addresses, routes in entries:
            none = tokens - len(routes)
            numbers += addresses
            numbers += [*routes, *[-1] * none, *(route // width for route in routes), *[0] * none]
        return Table(on_device(numbers, layer.x.device), len(entries), tokens)

    def launch(self, layer: Layer, table: Table, *, has_sum: bool) -> None:
        """The launch of `multiply`, of `MOST_EXPERTS` at most."""
        numbers, experts, tokens = table
        assert experts <= MOST_EXPERTS, experts
        tile, device = self._tile or tile_for(tokens), layer.x.device
        programs = experts * sum(tasks_of(self.kind, tile)) + has_sum * sum_tasks(self.kind, len(layer.out))
        arguments = numbers, *layer, self._counts_on(device), experts, programs, layer.weights.shape[1]
        with _chosen(device):
            self._kernels(tokens).experts_of[programs,](*arguments, num_warps=tile.warps)

    def sum(self, layer: Layer) -> None:
        """The sum alone, of rows that are there: one launch."""
        grid = len(layer.out), sum_tasks(self.kind, 1)
        with _chosen(layer.out.device):
            self._kernels(1).weighted_sum[grid](*layer[2:], layer.weights.shape[1], self.kind.hidden)

    def _counts_on(self, device: torch.device) -> torch.Tensor:
        """Zeros between launches."""
        if device not in self._counts:
            self._counts[device] = torch.zeros(COUNTED, dtype=torch.int32, device=device)
        return self._counts[device]

    def _kernels(self, tokens: int) -> Kernels:
        if tokens not in self._made:
            self._made[tokens] = kernels_of(self.kind, tokens, self._tile)
        return self._made[tokens]


def _chosen(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the device that torch has chosen."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def padded(most: int) -> int:
    """Tokens that an entry has room for: 1, 2, 4 or 8."""
    assert 0 < most <= MOST_TOKENS, most
    return 1 << (most - 1).bit_length()
