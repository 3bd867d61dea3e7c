"""The kernels for experts in slots: are they right on this GPU, and how near do they come to its memory's rate?

A layer's experts are read once a token, so the least time is that of their bytes at the memory's rate. Two times are
taken: *device*, of a captured graph of many layers, which has no Python in it, and *eager*, as the engine launches
them. Each layer has slots of its own, all of them more than any cache holds. Beside them torch's way: library products
on weights that are unpacked first where they are quantised.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.gpu.compiled import DENSE, kind_of
from smoe.formats.base import Format
from smoe.formats.registry import FORMATS
from smoe.gpu_kernels.compiled import is_available
from smoe.gpu_kernels.slot_experts import Entry, Layer, SlotExperts
from smoe.gpu_kernels.source import ExpertKind, MatrixLayout, Tile
from smoe.kernels.unpacked import unpacked


class Shape(NamedTuple):
    """Of a model's experts."""

    name: str
    hidden: int
    inner: int
    width: int


SHAPES = (
    Shape("Qwen3-30B-A3B", 2048, 768, 8),
    Shape("gpt-oss", 2816, 2816, 4),  # 2880 without the rest that blocks of 256 leave
    Shape("Mixtral-8x7B", 4096, 14336, 2),
)
PROOF = Shape("proof", 512, 256, 2)
SMALL = Shape("small", 64, 32, 2)
TIMED = (DENSE, "Q8_0", "FP8", "W4_128", "INT4", "Q4_K", "MXFP4_PAIRS")
TILES = tuple(
    Tile(outputs, numbers, warps)
    for outputs, numbers in ((8, 1024), (8, 2048), (16, 1024), (16, 2048), (16, 4096), (32, 4096))
    for warps in (2, 4, 8)
)
_ROOM = 1 << 30
"""Bytes of experts that are gone through: more than the caches of any GPU."""
_ROUNDS = 5


def slot_figures(device: torch.device, is_dry: bool) -> dict[str, Any]:
    """Errors of every format, then times; on a CPU only where Triton interprets, and small."""
    if not is_available():
        return {"skipped": "Triton is not installed"}
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return {"skipped": "without a GPU only with TRITON_INTERPRET=1 in the environment"}
    names = [DENSE, "Q8_0"] if is_dry else [DENSE, *FORMATS]
    proof = SMALL if is_dry else PROOF
    errors = [error(name, proof, tokens, device) for name in names for tokens in ((1,) if is_dry else (1, 3, 8))]
    figures: dict[str, Any] = {"errors": errors}
    figures["memory_bytes_per_second"] = memory_rate(device, 1 << (20 if is_dry else 30))
    rows = figures["rows"] = []
    for shape in (SMALL,) if is_dry else SHAPES:
        for name in ("Q8_0",) if is_dry else TIMED:
            for tokens in (1,) if is_dry or shape != SHAPES[0] else (1, 2, 4, 8):
                rows.append(timed(name, shape, tokens, device, is_dry))
    tiles = (Tile(64, 1 << 13),) if is_dry else TILES
    swept = ("Q8_0",) if is_dry else (DENSE, "INT4", "Q4_K", "MXFP4_PAIRS")
    figures["tiles"] = [row for name in swept for row in by_tile(name, SMALL if is_dry else SHAPES[0], tiles, device)]
    return figures


class Experts:
    """Experts of a format in the device's memory, with random codes."""

    def __init__(self, kind: ExpertKind, count: int, device: torch.device) -> None:
        self.kind = kind
        chance = np.random.default_rng(0)
        self._one = [self._matrix(each, chance) for each in (*kind.ups, kind.down)]
        self.matrices = [[each.to(device, copy=True) for each in self._one] for _ in range(count)]
        """Of every expert; all have the same numbers, at addresses of their own."""

    @cached_property
    def exact(self) -> list[torch.Tensor]:
        """The numbers of every matrix, on the host."""
        layouts = (*self.kind.ups, self.kind.down)
        return [self._numbers(each, of) for each, of in zip(self._one, layouts, strict=True)]

    @property
    def expert_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.matrices[0])

    def entry(self, expert: int, routes: Sequence[int]) -> Entry:
        return Entry([each.data_ptr() for each in self.matrices[expert]], routes)

    def _matrix(self, layout: MatrixLayout, chance: np.random.Generator) -> torch.Tensor:
        if layout.form is None:
            numbers = chance.standard_normal((layout.outputs, layout.columns), np.float32) / 16
            return torch.from_numpy(numbers).bfloat16()
        return torch.from_numpy(random_blocks(layout.form, layout.outputs, layout.columns, chance))

    def _numbers(self, stored: torch.Tensor, layout: MatrixLayout) -> torch.Tensor:
        if layout.form is None:
            return stored.double()
        return torch.from_numpy(layout.form.decode(stored.numpy())).double()


def random_blocks(form: Format, outputs: int, columns: int, chance: np.random.Generator) -> Any:
    """Any codes, with small scales: uint8 [outputs, bytes]."""
    data = chance.integers(0, 256, (outputs, form.row_bytes(columns)), dtype=np.uint8)
    blocks = data.reshape(-1, form.nbytes)
    for scalar in form.scalars:
        if scalar.kind == "E8M0":
            blocks[:, scalar.byte] = chance.integers(115, 120, len(blocks))
            continue
        kind = np.float16 if scalar.kind == "F16" else np.float32
        scales = chance.uniform(1e-4, 1e-3, (len(blocks), 1)).astype(np.float16).astype(kind)
        blocks[:, scalar.byte : scalar.byte + scalar.nbytes] = scales.view(np.uint8)
    if form.is_float8:
        codes = blocks[:, form.scale.nbytes :]
        codes[codes & 127 == 127] = 8  # no numbers
    return data


def error(name: str, shape: Shape, tokens: int, device: torch.device) -> dict[str, Any]:
    """The largest error of any output beside float64 on the format's own decoder, relative to the largest output."""
    kind = kind_of(name, shape.hidden, shape.inner, alignment=2 if name == DENSE else 1)
    experts, x = Experts(kind, 2, device), torch.randn(tokens, kind.hidden).bfloat16()
    layer = layer_of(kind, x.to(device), 2)
    entries = [experts.entry(n, range(n, 2 * tokens, 2)) for n in range(2)]
    SlotExperts(kind).multiply(layer, entries, tokens, has_sum=True)
    *ups, down = experts.exact
    wanted = (kind.activation.of(x.double() @ torch.cat(ups).T) @ down.T).repeat_interleave(2, 0)
    far = (layer.rows.cpu().double() - wanted).abs().max() / wanted.abs().max()
    total = (layer.weights.cpu().double().unsqueeze(-1) * wanted.view(tokens, 2, -1)).sum(1)
    far_sum = (layer.out.cpu().double() - total).abs().max() / total.abs().max()
    return {"format": name, "tokens": tokens, "relative_error": float(far), "relative_error_of_sum": float(far_sum)}


def layer_of(kind: ExpertKind, x: torch.Tensor, width: int) -> Layer:
    """So many experts for each token, of any weights."""
    order = torch.arange(len(x) * width, device=x.device).view(len(x), width)
    return Layer.of(kind, x, torch.rand(len(x), width, device=x.device), order)


def memory_rate(device: torch.device, nbytes: int) -> float:
    """Bytes a second that the device reads and writes in a copy: what a kernel that only reads may reach, too."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / _seconds(device, lambda: target.copy_(source))


def timed(name: str, shape: Shape, tokens: int, device: torch.device, is_dry: bool) -> dict[str, Any]:
    """One layer's experts for tokens that all choose the same ones: their bytes are read once."""
    kind = kind_of(name, shape.hidden, shape.inner)
    experts, layers = _layers(kind, shape, device, is_dry)
    kernel, x = SlotExperts(kind), torch.randn(tokens, kind.hidden, device=device).bfloat16()
    run = _Layers(kernel, experts, shape.width, tokens, x)
    nbytes = shape.width * experts.expert_bytes
    row: dict[str, Any] = {"format": name, "shape": shape.name, "tokens": tokens, "bytes": nbytes, "layers": layers}
    ways: dict[str, Callable[[], None]] = {"eager": lambda: run.eager(layers)}
    if device.type == "cuda":
        ways["device"] = _captured(lambda: run.launched(layers))
    for way, work in ways.items():
        seconds = _seconds(device, work) / layers
        row |= {f"{way}_seconds": seconds, f"{way}_bytes_per_second": nbytes / seconds}
    row["torch_seconds"] = _seconds(device, lambda: _by_torch(experts, shape.width, layers, x)) / layers
    return row


def by_tile(name: str, shape: Shape, tiles: Sequence[Tile], device: torch.device) -> Iterator[dict[str, Any]]:
    """One token, by several tiles: which is the best one here."""
    kind = kind_of(name, shape.hidden, shape.inner)
    experts, layers = _layers(kind, shape, device, device.type != "cuda")
    x = torch.randn(1, kind.hidden, device=device).bfloat16()
    for tile in tiles:
        run = _Layers(SlotExperts(kind, tile), experts, shape.width, 1, x)
        is_here = device.type == "cuda"
        work = _captured(partial(run.launched, layers)) if is_here else partial(run.eager, 1)
        rate = layers * shape.width * experts.expert_bytes / _seconds(device, work)
        yield {"format": name, "tile": tile._asdict(), "device_bytes_per_second": rate}


class _Layers:
    """The same work for one layer after the other, each with experts of its own."""

    def __init__(self, kernel: SlotExperts, experts: Experts, width: int, tokens: int, x: torch.Tensor) -> None:
        self._kernel, self._tokens = kernel, tokens
        self._layer = layer_of(kernel.kind, x, width)
        routes = [[t * width + k for t in range(tokens)] for k in range(width)]
        count = len(experts.matrices)
        self._entries = [
            [experts.entry((first + k) % count, routes[k]) for k in range(width)] for first in range(0, count, width)
        ]
        self._tables = [kernel.table(self._layer, entries, tokens) for entries in self._entries]

    def eager(self, layers: int) -> None:
        """As the engine does it."""
        for n in range(layers):
            self._kernel.multiply(self._layer, self._entries[n], self._tokens, has_sum=True)

    def launched(self, layers: int) -> None:
        """With tables that are there: nothing crosses the link."""
        for n in range(layers):
            self._kernel.launch(self._layer, self._tables[n], has_sum=True)


def _layers(kind: ExpertKind, shape: Shape, device: torch.device, is_dry: bool) -> tuple[Experts, int]:
    """Experts for so many layers that no cache holds them."""
    nbytes = Experts(kind, 1, torch.device("cpu")).expert_bytes
    layers = 1 if is_dry else max(2, -(-_ROOM // (nbytes * shape.width)))
    return Experts(kind, layers * shape.width, device), layers


@torch.no_grad()
def _by_torch(experts: Experts, width: int, layers: int, x: torch.Tensor) -> None:
    kind = experts.kind
    for n in range(layers):
        total = torch.zeros_like(x)
        for matrices in experts.matrices[n * width : (n + 1) * width]:
            forms = [each.form for each in (*kind.ups, kind.down)]
            *ups, down = (
                each if form is None else unpacked(form, each, x.dtype)
                for each, form in zip(matrices, forms, strict=True)
            )
            wide = torch.cat([x @ each.T for each in ups], -1)
            total += kind.activation.of(wide) @ down.T
    assert total.shape == x.shape


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    """The same as one CUDA graph; what compiles does so before."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The fastest of some rounds, each until the device is done."""
    fastest = float("inf")
    for _ in range(1 + _ROUNDS if device.type == "cuda" else 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - began)
    return fastest
