"""Rows that are alone have the bits of a single row, however many are computed together.

Sums here are longer than the library's chains, which it makes twice as long for several rows: in the library's order
a test would fail without the flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from smoe.fastpath import linear
from smoe.formats.registry import FORMATS
from smoe.kernels.elementwise import activation_table
from smoe.kernels.expert_work import Expert
from smoe.kernels.experts import Sums, TokenExperts
from smoe.kernels.isa import widest
from smoe.kernels.matrix import in_bf16
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from smoe.models.quantised_linear import QuantisedLinear
from tests.formats.blocks import random_rows

HIDDEN, INNER = 2048, 1088
pytestmark = pytest.mark.skipif(widest() is None, reason="this CPU has no instruction set that kernels are for")


@pytest.fixture(params=["native", "own-order"])
def alone(request: pytest.FixtureRequest) -> Iterator[SpinningPool]:
    """A pool that gives rows the bits that they have alone."""
    if request.param == "native" and not is_supported():
        pytest.skip("this CPU has no products in the library's order")
    with SpinningPool(2, several=True, in_own_order=request.param == "own-order") as pool:
        pool.rows_are_alone = True
        yield pool


def rows_of(count: int, columns: int) -> torch.Tensor:
    return torch.randn(count, columns).bfloat16()


def each(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([module(row) for row in rows.split(1)])


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers(count: int, bias: bool, alone: SpinningPool) -> None:
    layer = nn.Linear(HIDDEN, 160, bias=bias).bfloat16().requires_grad_(False)
    linear.speed_up(layer, alone, {}, is_measured=False)
    rows = rows_of(count, HIDDEN)
    assert torch.equal(layer(rows), each(layer, rows))
    assert torch.equal(layer(rows.view(count, 1, HIDDEN)), each(layer, rows).view(count, 1, 160))


@pytest.mark.parametrize("count", [2, 5])
def test_routers(count: int, alone: SpinningPool) -> None:
    """One whose weight is ours, and one that computes in float32, which the library multiplies in its own way."""

    class Router(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, HIDDEN).bfloat16(), requires_grad=False)
            self.dtype = dtype

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = functional.linear(x.to(self.dtype), self.weight.to(self.dtype))
            return logits, logits.topk(2).indices

    for dtype in (torch.bfloat16, torch.float32):
        router = Router(dtype)
        linear.speed_up(nn.ModuleList([router]), alone, {router: True}, is_measured=False)
        rows = rows_of(count, HIDDEN)
        both = [router(row) for row in rows.split(1)]
        for ours, *theirs in zip(router(rows), *both, strict=True):
            assert torch.equal(ours, torch.cat(theirs))


@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["Q4_K", "Q8_0", "MXFP4"])
def test_layers_that_stay_quantised(form: str, bias: bool, count: int, alone: SpinningPool) -> None:
    codes = torch.from_numpy(np.ascontiguousarray(random_rows(FORMATS[form], 96, HIDDEN, 0)))
    layer = QuantisedLinear(FORMATS[form], codes, torch.bfloat16, torch.randn(96).bfloat16() if bias else None)
    linear.multiply_codes(layer, alone)
    rows = rows_of(count, HIDDEN)
    assert torch.equal(layer(rows), each(layer, rows))


def swiglu(wide: torch.Tensor) -> torch.Tensor:
    gate, up = wide.chunk(2, dim=-1)
    return functional.silu(gate) * up


def through(
    kernel: TokenExperts, x: torch.Tensor, chosen: Sequence[Sequence[int]], matrices: list[Sequence[torch.Tensor]]
) -> torch.Tensor:
    """Every token through the experts that it has chosen, each once."""
    flat = [(token, expert) for token, some in enumerate(chosen) for expert in some]
    places: dict[int, list[tuple[int, int]]] = {}
    for row, (token, expert) in enumerate(flat):
        places.setdefault(expert, []).append((token, row))
    experts = [Expert(in_bf16(*matrices[expert]), some) for expert, some in places.items()]
    out, rows = torch.zeros_like(x), x.new_empty(len(flat), x.shape[1])
    spans = [(sum(map(len, chosen[:token])), len(some)) for token, some in enumerate(chosen)]
    kernel.forward(x, experts, rows, Sums([1.0 / (1 + row % 3) for row in range(len(flat))], spans, out))
    return out


def test_experts(alone: SpinningPool) -> None:
    """Six tokens, of which five choose the same expert: more than are multiplied at once."""
    table = activation_table(swiglu)
    assert table is not None
    kernel = TokenExperts(alone, HIDDEN, INNER, table)
    shapes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    matrices = [[(0.05 * torch.randn(shape)).bfloat16().t() for shape in shapes] for _ in range(4)]
    x = rows_of(6, HIDDEN)
    chosen = [[0, 1, 2], [0, 1, 3], [0, 2, 3], [0, 1, 2], [0, 2, 3], [1, 2, 3]]
    together = through(kernel, x, chosen, matrices)
    for token, some in enumerate(chosen):
        assert torch.equal(together[token : token + 1], through(kernel, x[token : token + 1], [some], matrices))
