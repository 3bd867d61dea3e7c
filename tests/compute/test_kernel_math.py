"""Experts computed by our kernels alone, against the library's operations on the same weights, bit by bit.

Would catch another order of sums for a number of rows that nobody thought of, a part of many rows that is left alone, a
proof that does not notice it, and rows beyond those for which the bits are main's.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from smoe.compute.expert_math import ExpertMath
from smoe.compute.kernel_math import KernelMath
from smoe.compute.kernel_rows import kernel_rows
from smoe.compute.row_groups import MatrixShape
from smoe.kernels.elementwise import activation_table
from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import SpinningPool
from smoe.memory.arena import Arena
from smoe.memory.store import Part, page_ceil
from tests import promised

HIDDEN, INNER = 1536, 96
"""So many numbers a row that one row is summed in another order than several."""
SHAPES = [MatrixShape(HIDDEN, 2 * INNER, True), MatrixShape(INNER, HIDDEN, True)]


def swiglu(wide: torch.Tensor) -> torch.Tensor:
    gate, up = wide.chunk(2, dim=-1)
    return functional.silu(gate) * up


def both(arena: Arena) -> tuple[ExpertMath, KernelMath, dict[str, int]]:
    """The library's arithmetic and ours, and where in slot 0 one expert lies."""
    module: Any = SimpleNamespace(is_transposed=False, has_gate=True, _apply_gate=swiglu)
    parts = (Part("gate_up_proj", (2 * INNER, HIDDEN)), Part("down_proj", (HIDDEN, INNER)))
    table = activation_table(swiglu)
    assert table is not None
    offsets = {"gate_up_proj": 64, "down_proj": 64 + 4 * INNER * HIDDEN}
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(2 * INNER, HIDDEN // 2, generator=generator)
    arena.view(0, offsets["gate_up_proj"], (2 * INNER, HIDDEN), torch.bfloat16).copy_(torch.cat([half, half], 1))
    down = torch.randn(HIDDEN, INNER, generator=generator)
    arena.view(0, offsets["down_proj"], (HIDDEN, INNER), torch.bfloat16).copy_(down)
    bits = table.view(torch.uint16).numpy().astype(np.uint16)
    return ExpertMath(module, parts, torch.bfloat16), KernelMath(HIDDEN, INNER, bits), offsets


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena([(1, page_ceil(64 + 6 * INNER * HIDDEN))])
    yield made
    made.close()


def same(ours: KernelMath, theirs: ExpertMath, arena: Arena, offsets: dict[str, int], rows: int) -> bool:
    """On rows of which every number comes twice, once with the other sign: what is left shows the order of the sum."""
    generator = torch.Generator().manual_seed(rows)
    half = torch.randn(rows, HIDDEN // 2, generator=generator)
    half = half * torch.randint(-6, 7, half.shape, generator=generator).exp2()
    x = torch.cat([half, -half], 1).bfloat16()
    out = ours.forward(x.view(torch.uint16).numpy(), ours.bind(arena, 0, offsets))
    expected = theirs.forward(x, theirs.bind(arena, 0, offsets))
    return torch.equal(torch.from_numpy(out.astype(np.uint16)).view(torch.bfloat16), expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 33, 300, 513, 1100])
def test_the_bits_are_the_librarys(rows: int, pool: SpinningPool, arena: Arena) -> None:
    theirs, ours, offsets = both(arena)
    ours = ours.by_pool(pool)
    promised.holds(
        same(ours, theirs, arena, offsets, rows), lambda: kernel_rows(pool, SHAPES) >= rows, f"{rows} rows of an expert"
    )


@pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
def test_in_our_own_order_it_is_what_main_has_in_its(arena: Arena) -> None:
    theirs, ours, offsets = both(arena)
    with SpinningPool(1, in_own_order=True) as mains, SpinningPool(2, in_own_order=True) as workers:
        theirs, ours = theirs.by_pool(mains), ours.by_pool(workers)
        for rows in (*range(1, min(workers.most_own_rows, 40)), workers.most_own_rows):
            assert same(ours, theirs, arena, offsets, rows), rows
        with pytest.raises(ValueError, match="at most"):
            same(ours, theirs, arena, offsets, workers.most_own_rows + 1)


@pytest.mark.parametrize("wrong", [1, 2, 7, 40])
def test_other_bits_are_noticed(wrong: int, pool: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From so many rows on, one number is another."""
    assert kernel_rows(pool, SHAPES) >= 1
    for name in ("multiply", "multiply_rows"):
        original = getattr(pool, name)

        def off(*given: Any, original: Any = original) -> None:
            original(*given)
            out = given[0][0].out if len(given) == 1 else given[2]
            if len(out) >= wrong:
                out[-1, -1] = -out[-1, -1]

        monkeypatch.setattr(pool, name, off)
    assert kernel_rows(pool, SHAPES) < wrong


def test_shapes_that_no_kernel_knows(pool: SpinningPool) -> None:
    assert kernel_rows(pool, [SHAPES[0], MatrixShape(INNER, HIDDEN, False)]) == 0
    assert kernel_rows(pool, [MatrixShape(HIDDEN, 100, True)]) == 0
