"""Our one-row product against the library's, bit by bit.

Would catch another order of summation, a wrong strip or tail, a share of the outputs that is computed twice or not at
all.
"""

from __future__ import annotations

import pytest
import torch

from smoe.kernels import jit, row_product
from smoe.kernels.row_product import RowProduct, agrees, fits

SHAPES = [(192, 32), (64, 96), (16, 512), (1536, 544), (64, 768), (512, 2048), (48, 4096), (256, 1408)]
"""[N, K]: below, at and above one chain of 512 k, whole chains and remainders."""


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 0.05).bfloat16().t()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_bits_are_the_librarys(rows: int, columns: int, product: RowProduct) -> None:
    assert agrees(product, matrix(rows, columns))


def test_odd_addresses_and_extreme_values(product: RowProduct) -> None:
    rows, columns = 64, 544
    bank = torch.randn(rows * columns + 5).bfloat16()
    for begin in range(5):  # addresses two bytes apart
        w = bank[begin : begin + rows * columns].view(rows, columns).t()
        assert agrees(product, w)
    w = matrix(rows, columns)
    w[3, 0], w[5, 1], w[7, 2] = float("inf"), float("nan"), 1e38
    x, out = torch.full((1, columns), 9.0).bfloat16(), torch.empty(1, rows, dtype=torch.bfloat16)
    product(x, w, out)
    assert torch.equal(out.isnan(), (x @ w).isnan())
    assert torch.equal(out.nan_to_num(), (x @ w).nan_to_num())


@pytest.mark.parametrize("members", [1, 2, 3, 7])
def test_shares_cover_the_outputs_once(members: int, product: RowProduct) -> None:
    w, x = matrix(80, 96), torch.randn(1, 96).bfloat16()
    out = torch.full((1, 80), float("nan")).bfloat16()
    for member in range(members):
        share = torch.full((1, 80), float("nan")).bfloat16()
        product.part(x, w, share, member, members)
        written = ~share.isnan()
        assert not (written & ~out.isnan()).any(), "computed twice"
        out = torch.where(written, share, out)
    assert torch.equal(out, x @ w)


def test_a_wrong_order_is_noticed(product: RowProduct, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof itself: a kernel whose chains are twice as long differs in the last bit of few outputs."""
    monkeypatch.setattr(row_product, "CHAIN", 1024)
    assert not agrees(RowProduct(), matrix(1536, 2048))


@pytest.mark.parametrize(
    "w",
    [
        torch.zeros(64, 128, dtype=torch.bfloat16),  # columns lie one after the other
        torch.zeros(160, 40, dtype=torch.bfloat16).t(),  # not a whole tile
        torch.zeros(328, 32, dtype=torch.bfloat16).t(),  # not a whole strip
        torch.zeros(160, 64).t(),
        torch.zeros(160, 64, dtype=torch.bfloat16, device="meta").t(),
        torch.zeros(64, 64, dtype=torch.bfloat16).t(),  # so small that torch takes another way itself
    ],
)
def test_other_matrices_are_left_to_the_library(w: torch.Tensor) -> None:
    assert not fits(w)


def test_without_the_compiler_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "llvm", None)
    assert row_product.row_product.__wrapped__() is None
