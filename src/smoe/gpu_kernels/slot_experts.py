"""Launches of the kernels for experts in slots, and what they write into: nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from smoe.gpu_kernels.compiled import Kernels, kernels_of
from smoe.gpu_kernels.source import MOST_TOKENS, SUM_COLUMNS, Kind, Tile, tile_for
from smoe.memory.streams import on_device


class Entry(NamedTuple):
    """One expert of a launch."""

    addresses: Sequence[int]
    """Of its matrices and biases, in the order of `Kind`."""
    routes: Sequence[int]
    """Its flat positions t * K + k in the choice [T, K]."""


class Table(NamedTuple):
    """The experts of one launch, as the kernels read them (`source.py`)."""

    numbers: torch.Tensor
    """int64 [numbers of all entries]"""
    experts: int
    tokens: int
    """That an entry has room for."""


class SlotExperts:
    """The kernels for experts of one kind."""

    def __init__(self, kind: Kind, tile: Tile | None = None) -> None:
        """`tile`: what programs work on at a time, where it is not what we have chosen."""
        self.kind = kind
        self._tile = tile
        self._steps = [(n, each.alignment) for n, each in enumerate((*kind.ups, kind.down)) if each.alignment > 1]
        self._made: dict[int, Kernels] = {}
        """By the tokens that an entry has room for."""

    def multiply(self, x: torch.Tensor, entries: Sequence[Entry], width: int, most: int, scratch: Scratch) -> None:
        """Experts for tokens x [T, H], into their rows of `scratch`: two launches, and one small copy to the device.

        `width`: K. `most`: routes of any expert of the whole layer at most, whichever launch it is in; an expert's
        bits depend on it.
        """
        self.launch(x, self.table(entries, width, most, x.device), scratch)

    def table(self, entries: Sequence[Entry], width: int, most: int, device: torch.device) -> Table:
        """What one launch is told of its experts, where the device computes."""
        assert not any(each.addresses[n] % step for each in entries for n, step in self._steps), "not aligned"
        tokens, numbers = padded(most), list[int]()
        for addresses, routes in entries:
            none = tokens - len(routes)
            numbers += addresses
            numbers += [*routes, *[-1] * none, *(route // width for route in routes), *[0] * none]
        return Table(on_device(numbers, device), len(entries), tokens)

    def launch(self, x: torch.Tensor, table: Table, scratch: Scratch) -> None:
        """The two launches of `multiply`."""
        kind, (numbers, experts, tokens) = self.kind, table
        kernels, tile = self._kernels(tokens), self._tile or tile_for(tokens)
        up_grid, down_grid = ((-(-count // tile.outputs), experts) for count in (kind.inner, kind.hidden))
        with _chosen(x.device):
            kernels.up[up_grid](numbers, x, scratch.inner, num_warps=tile.warps)
            kernels.down[down_grid](numbers, scratch.inner, scratch.rows, num_warps=tile.warps)

    def sum(self, scratch: Scratch, weights: torch.Tensor, order: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, H] of the rows of `scratch` and weights [T, K]; `order` int64 [T, K]: the routes of every token in
        the order of the sum, -1: none. One launch."""
        tokens, width = weights.shape
        grid = tokens, -(-self.kind.hidden // SUM_COLUMNS)
        with _chosen(out.device):
            self._kernels(1).weighted_sum[grid](scratch.rows, weights, order, out, width, self.kind.hidden)

    def _kernels(self, tokens: int) -> Kernels:
        if tokens not in self._made:
            self._made[tokens] = kernels_of(self.kind, tokens, self._tile)
        return self._made[tokens]


class Scratch(NamedTuple):
    """What every route of a layer gives, in float32."""

    inner: torch.Tensor
    """[T * K, I]"""
    rows: torch.Tensor
    """[T * K, H]"""

    @classmethod
    def of(cls, kind: Kind, routes: int, device: torch.device) -> Scratch:
        """Room for so many routes."""
        inner, rows = (torch.empty(routes, n, dtype=torch.float32, device=device) for n in (kind.inner, kind.hidden))
        return cls(inner, rows)


def _chosen(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the device that torch has chosen."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def padded(most: int) -> int:
    """Tokens that an entry has room for: 1, 2, 4 or 8."""
    assert 0 < most <= MOST_TOKENS, most
    return 1 << (most - 1).bit_length()
