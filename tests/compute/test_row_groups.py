"""Groups of rows filled up to few distinct numbers: same bits, and refused where the library's bits depend on them."""

from __future__ import annotations

import pytest
import torch

from smoe.compute import row_groups
from smoe.compute.row_groups import Filling, MatrixShape, filled_up, product

SHAPES = (MatrixShape(96, 64, True), MatrixShape(32, 96, True))


@pytest.fixture
def without_proofs(monkeypatch):
    """As if every proof had succeeded."""
    monkeypatch.setattr(row_groups, "_is_the_same", lambda *_: True)


def test_the_numbers_are_few_and_close():
    numbers = [filled_up(rows) for rows in range(1, 513)]
    assert all(rows <= number <= 1.25 * rows for rows, number in enumerate(numbers, start=1))
    assert len(set(numbers)) == 32 and numbers == sorted(numbers)


@pytest.mark.parametrize("rows", [2, 8, 9, 17, 100, 129])
def test_rows_come_back_as_if_alone(rows, without_proofs):
    """Integers, whose sums are exact in any order: would catch rows lost, shifted or mixed with the filling."""
    x = torch.randint(-3, 4, (rows, 32)).float()
    matrix = torch.randint(-3, 4, (16, 32)).float().t()
    filling = Filling((MatrixShape(32, 16, True),), torch.float32)
    assert torch.equal(product(x, matrix, filling), x @ matrix)


def test_the_library_meets_few_numbers_and_only_where_proven(monkeypatch):
    met, proofs = [], []
    real = torch.nn.functional.pad
    monkeypatch.setattr(row_groups.functional, "pad", lambda x, sizes: met.append(sizes[-1]) or real(x, sizes))
    monkeypatch.setattr(row_groups, "_is_the_same", lambda shape, ends, *_: proofs.append(ends) or ends[-1] == 16)
    matrix = torch.ones(4, 4)
    filling = Filling((MatrixShape(4, 4, True),), torch.float32)
    product(torch.ones(9, 4), matrix, None)
    product(torch.ones(8, 4), matrix, filling)
    product(torch.ones(513, 4), matrix, filling)
    assert met == proofs == [], "short prompts need no proof, and leave no kernels of one"
    for rows in (17, 9, 11, 17):
        product(torch.ones(rows, 4), matrix, filling)
    assert met == [1, 1], "17 rows are not proven"
    assert proofs == [(17, 20, 21, 24, 25, 28, 29, 32), (9, 10, 11, 12, 13, 14, 15, 16)], "each octave once"
    filling.threads += 1
    product(torch.ones(9, 4), matrix, filling)
    assert len(met) == 2


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
def test_what_is_proven_holds_on_other_data():
    filling = Filling(SHAPES, torch.bfloat16)
    if not filling.allows(400):
        pytest.skip("this CPU's library sums in an order that depends on the number of rows: left alone")
    for shape in SHAPES:
        matrix = torch.randn(shape.outputs, shape.columns).bfloat16().t()
        for rows in range(2, 513, 7):
            x = torch.randn(rows, shape.columns).bfloat16()
            assert torch.equal(product(x, matrix, filling), x @ matrix)


def test_another_order_for_another_number_is_seen(monkeypatch):
    """A library that sums 13 rows in two halves: no real data of this size would show it for certain."""
    row_groups._is_the_same.cache_clear()
    real = row_groups._multiply

    def moody(x, matrix):
        if x.shape[0] != 13:
            return real(x, matrix)
        half = x.shape[1] // 4
        parts = real(x[:, :half].float(), matrix[:half].float()), real(x[:, half:].float(), matrix[half:].float())
        return (parts[0] + parts[1]).to(x.dtype)

    monkeypatch.setattr(row_groups, "_multiply", moody)
    filling = Filling(SHAPES, torch.bfloat16)
    found = [filling.allows(rows) for rows in (9, 13, 16)]
    row_groups._is_the_same.cache_clear()
    assert found == [False] * 3


def test_matrices_too_large_to_gain_are_left_alone():
    assert not Filling((MatrixShape(14336, 28672, True),), torch.bfloat16).allows(9)
