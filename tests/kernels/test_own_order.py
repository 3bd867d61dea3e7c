"""bf16 products in our own order, on every instruction set that this CPU has, against float64 and torch.

Would catch: even and odd numbers exchanged, a lost last line of a row, a row of x taken for another, a sum in 16 bits,
bits that hang on who computes an output.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smoe.kernels import own_order, proof
from smoe.kernels.isa import ISAS, Isa, widest
from smoe.kernels.jit import is_available
from smoe.kernels.spinning_pool import Product, SpinningPool
from tests.kernels import products

pytestmark = pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
if is_available():
    from smoe.kernels.jit import Source, compile_functions

with_and_without_prefetches = pytest.mark.parametrize("prefetches", [True, False])


@functools.cache
def compiled(isa: Isa, prefetches: bool) -> dict[int, Any]:
    names = {rows: own_order.products_name(rows) for rows in (1, 2, 4)}
    made = compile_functions(
        Source(own_order.module_of, (isa, prefetches)), dict.fromkeys(names.values(), products.ARGUMENTS)
    )
    return dict(zip(names, made, strict=True))


def numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_near(ours: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """One rounding to bf16, and float32's sums."""
    exact, magnitude = x.double() @ weights.double().T, x.double().abs() @ weights.double().abs().T
    if bias is not None:
        exact = exact + bias.double()
    assert bool(((ours.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5 * magnitude).all())


@with_and_without_prefetches
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("columns", [32, 64, 96, 2048])
def test_errors_are_those_of_rounding(isa: Isa, prefetches: bool, rows: int, columns: int) -> None:
    weights, x = numbers(23, columns), numbers(rows, columns, seed=1)
    ours = products.multiplied_at(compiled(isa, prefetches), weights.data_ptr(), 23, x)
    assert_near(ours, x, weights)
    errors = [
        float((each.double() - x.double() @ weights.double().T).square().mean()) for each in (ours, x @ weights.T)
    ]
    assert errors[0] <= 1.1 * errors[1]


@given(
    lines=st.integers(1, 5),
    outputs=st.integers(1, 9),
    scale=st.sampled_from([0.0, 1e-38, 1e-30, 1.0, 1e15]),
    outlier=st.sampled_from([0.0, 1.0, -3e4]),
    seed=st.integers(0, 99),
)
def test_every_instruction_set_gives_the_same_up_to_rounding(
    lines: int, outputs: int, scale: float, outlier: float, seed: int
) -> None:
    weights, x = numbers(outputs, 32 * lines, seed=seed) * scale, numbers(4, 32 * lines, seed=seed + 1)
    x[:, seed % x.shape[1]] += outlier
    for isa in ISAS:
        if isa.is_here:
            for rows, prefetches in product((1, 2, 4), (True, False)):
                ours = products.multiplied_at(compiled(isa, prefetches), weights.data_ptr(), outputs, x[:rows])
                if scale > 1e-35:  # dot products of pairs take what is denormal for zero
                    assert_near(ours, x[:rows], weights)
                else:
                    assert bool((ours.float().abs() <= 1e-30).all())


@with_and_without_prefetches
def test_a_share_of_the_outputs_touches_nothing_else(isa: Isa, prefetches: bool) -> None:
    weights, x = numbers(23, 96), numbers(1, 96, seed=1)
    whole = products.multiplied_at(compiled(isa, prefetches), weights.data_ptr(), 23, x)
    for begin, end in ((0, 0), (0, 3), (5, 10), (22, 23)):
        part = products.multiplied_at(compiled(isa, prefetches), weights.data_ptr(), 23, x, begin, end)
        assert torch.equal(part[:, begin:end], whole[:, begin:end])
        assert bool(part[:, :begin].isnan().all()) and bool(part[:, end:].isnan().all())


@with_and_without_prefetches
def test_a_bias_is_added_before_rounding(isa: Isa, prefetches: bool) -> None:
    weights, x, bias = numbers(23, 96), numbers(1, 96, seed=1), numbers(23, seed=2) * 100
    assert_near(
        products.multiplied_at(compiled(isa, prefetches), weights.data_ptr(), 23, x, bias=bias), x, weights, bias
    )


@with_and_without_prefetches
def test_what_is_no_number_shows(isa: Isa, prefetches: bool) -> None:
    weights, x = numbers(23, 96), numbers(1, 96, seed=1)
    weights[7, 95] = float("nan")
    found = products.multiplied_at(compiled(isa, prefetches), weights.data_ptr(), 23, x).isnan()
    assert found[0, 7] and found.sum() == 1


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8])
def test_the_bits_do_not_hang_on_threads(rows: int) -> None:
    weights, x = numbers(512, 2048), numbers(rows, 2048, seed=1)
    outs = []
    for threads in (1, 3):
        with SpinningPool(threads, in_own_order=True) as pool:
            out = x.new_empty(rows, 512)
            if rows == 1:
                pool.multiply([Product(x, weights.t(), out)])
            else:
                pool.multiply_rows(x, weights.t(), out)
            outs.append(out)
    assert torch.equal(*outs)
    assert_near(outs[0], x, weights)


def test_the_proof_accepts_it_and_notices_a_wrong_product() -> None:
    matrix, bias = numbers(512, 2048).t(), numbers(512, seed=2)
    with SpinningPool(2, in_own_order=True) as pool:
        assert proof.agrees(pool, matrix) and proof.part_that_agrees(pool, matrix, bias) == 0
        assert proof.agrees_on_rows(pool, matrix, 4)
        others = matrix.clone(memory_format=torch.preserve_format)
        multiply, rows = pool.multiply, pool.multiply_rows
        others[-1] = 0  # a lost last number is an error of two in a hundred
        pool.multiply = lambda given: multiply([each._replace(matrix=others) for each in given])  # type: ignore[method-assign]
        pool.multiply_rows = lambda x, _, out: rows(x, others, out)  # type: ignore[method-assign]
        assert not proof.agrees(pool, matrix)
        assert proof.part_that_agrees(pool, matrix, bias) is None
        assert not proof.agrees_on_rows(pool, matrix, 4)
