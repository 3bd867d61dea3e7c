"""Few tokens in one piece of machine code, against the library's operations, bit by bit.

Would catch a token that gets another's hidden state or weight, rows of an expert stacked in another order, a padded
token with somebody's output, a sum that runs before its last expert has come, more experts than there are counts.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from smoe.compute.decode_experts import ChosenExperts, DecodeExperts, way_of
from smoe.compute.expert_math import DenseWeights, ProvenKernels, Weights
from smoe.kernels.elementwise import activation_table
from smoe.kernels.experts import MOST_EXPERTS, MOST_TOKENS, TokenExperts
from smoe.kernels.matrix import in_bf16
from smoe.kernels.spinning_pool import SpinningPool
from smoe.policy.step import routes_by_key
from smoe.routing import Phase, Routing
from tests import promised

HIDDEN, INNER = 192, 96
BF16_ROUNDING = 2.0**-8
"""The largest relative error of one rounding to bf16 (8 binary digits)."""


@pytest.fixture
def pool(pool: SpinningPool) -> SpinningPool:
    """One that gives torch's bits of one row and of several, for experts of this size."""
    promised.needs_products(pool, (2 * INNER, HIDDEN), (HIDDEN, INNER), rows=[1, 2, 3, 4])
    return pool


def swiglu(wide: torch.Tensor) -> torch.Tensor:
    gate, up = wide.chunk(2, dim=-1)
    return functional.silu(gate) * up


def forward(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    return swiglu(x @ weights.up) @ weights.down


def forward_each(x: torch.Tensor, weights: list[Weights], out: torch.Tensor) -> None:
    for row, one in enumerate(weights):
        out[row : row + 1] = forward(x, one)


def some_weights(count: int) -> list[Weights]:
    generator = torch.Generator().manual_seed(count)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.3).bfloat16().t()

    pairs = [(matrix(2 * INNER, HIDDEN), matrix(HIDDEN, INNER)) for _ in range(count)]
    return [DenseWeights(up, down, None, None, in_bf16(up, down)) for up, down in pairs]


def both_ways(
    pool: SpinningPool, hidden: torch.Tensor, gains: torch.Tensor, *rest: Any
) -> tuple[DecodeExperts, DecodeExperts]:
    table = activation_table(swiglu)
    assert table is not None
    ways = []
    ours = TokenExperts(pool, HIDDEN, INNER, table, most_rows=3)
    for kernel in (ours, None):
        ways_of = {"forward": forward, "forward_each": forward_each}
        math: Any = SimpleNamespace(kernels=ProvenKernels(token=kernel), sums_as_weights=False, **ways_of)
        ways.append(way_of([math], None)(ChosenExperts([math] * len(rest[0]), hidden, gains, *rest)))
    return ways[0], ways[1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 6),
    experts=st.integers(4, 24),
    width=st.integers(1, 4),
    padded=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_the_bits_are_the_librarys(
    tokens: int, experts: int, width: int, padded: bool, seed: int, pool: SpinningPool
) -> None:
    """Some experts chosen by several tokens; computed in any order and in parts; one of them elsewhere."""
    chance = random.Random(seed)
    rows = [chance.sample(range(experts), width) for _ in range(tokens)]
    if padded and tokens > 1:
        rows[chance.randrange(tokens)] = [experts] * width
    found = list(routes_by_key(Routing(0, Phase.DECODE, experts, rows, None)).items())
    chance.shuffle(found)
    routes = [some for _, some in found]
    ascending = sorted(range(len(found)), key=lambda n: found[n][0])
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    gains = torch.rand(tokens, width, generator=generator)
    gains = gains.bfloat16() if seed % 2 else gains
    every = some_weights(experts)
    weights = [every[key[1]] for key, _ in found]
    cuts = sorted(chance.sample(range(1, len(found) + 1), min(2, len(found))))
    elsewhere = chance.randrange(len(found))
    ways = both_ways(pool, hidden, gains, routes, ascending)
    for way in ways:
        for first, end in zip([0, *cuts], [*cuts, len(found)], strict=True):
            part = list(range(first, end))
            while part:
                run = [n for n in part if n < elsewhere] if elsewhere in part else part
                if run:
                    way.compute(run[0], [weights[n] for n in run])
                if elsewhere in part:
                    x = hidden[[route // width for route in routes[elsewhere]]]
                    way.put(elsewhere, forward(x, weights[elsewhere]))
                    part = [n for n in part if n > elsewhere]
                else:
                    part = []
        if cuts[0] < len(found):
            assert way.partial(cuts[0]).shape == hidden.shape
    assert torch.equal(ways[0].total(), ways[1].total())


def test_a_partial_sum_is_of_those_that_are_done(pool: SpinningPool) -> None:
    """It steers a prediction only, so its last bits are nobody's: each of the n products, their n - 1 sums and the
    result may be rounded to bf16, or not. So it is off by at most 2 n roundings of what all products' sizes add up to,
    however they cancel."""
    hidden, gains = torch.randn(3, HIDDEN).bfloat16(), torch.rand(3, 2)
    routes = [[0, 4], [1], [3, 2], [5]]
    ways = both_ways(pool, hidden, gains, routes, [0, 1, 2, 3])
    weights = some_weights(4)
    products = torch.zeros(3, 2, HIDDEN, dtype=torch.float64)
    for n, route in ((0, 0), (0, 4), (1, 1)):
        token, choice = divmod(route, 2)
        products[token, choice] = forward(hidden[token : token + 1], weights[n])[0].double() * gains[token, choice]
    bound = 2 * 2 * BF16_ROUNDING * products.abs().sum(1)
    for way in ways:
        way.compute(0, weights[:2])
        assert ((way.partial(2) - products.sum(1)).abs() <= bound).all()
        assert way.partial(2)[1].count_nonzero() == 0
    assert ways[0].partial(0).shape == hidden.shape and ways[0].partial(0).count_nonzero() == 0


@pytest.mark.parametrize("tokens", [1, 40, MOST_TOKENS, MOST_TOKENS + 1])
def test_more_experts_or_tokens_than_the_kernel_takes_at_once(tokens: int, pool: SpinningPool) -> None:
    width = -(-(MOST_EXPERTS + 30) // tokens)
    hidden, gains = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, width)
    routes = [[n] for n in range(tokens * width)]
    ways = both_ways(pool, hidden, gains, routes, range(len(routes)))
    weights = some_weights(8)
    for way in ways:
        way.compute(0, [weights[n % 8] for n in range(len(routes))])
    assert torch.equal(ways[0].total(), ways[1].total())


@pytest.mark.parametrize("tokens", [1, 3])
def test_each_copy_is_computed_by_its_own_arithmetic(tokens: int) -> None:
    """By operations; copies of two formats in turn, and two of one beside each other."""

    def math_that(scales: float) -> Any:
        def each(x: torch.Tensor, weights: list[Weights], out: torch.Tensor) -> None:
            forward_each(x, weights, out)
            out *= scales

        return SimpleNamespace(
            kernels=ProvenKernels(),
            forward=lambda x, one: forward(x, one) * scales,
            forward_each=each,
            sums_as_weights=False,
        )

    kinds, weights = [math_that(1), math_that(-2)], some_weights(4)
    maths = [kinds[n] for n in (0, 1, 1, 0)]
    hidden, gains = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, 4)
    routes = [[4 * token + n for token in range(tokens)] for n in range(4)]
    run = way_of(maths, None)(ChosenExperts(maths, hidden, gains, routes, range(4)))
    run.compute(0, weights)
    expected = torch.zeros_like(hidden)
    for n, scales in enumerate((1, -2, -2, 1)):
        expected += (forward(hidden, weights[n]) * scales * gains[:, n : n + 1]).bfloat16()
    assert torch.equal(run.total(), expected)
