"""One token through several experts in machine code, against the library's operations, bit by bit.

Would catch another rounding or order of the sum, an activation that is not the module's, a unit that begins before what
it needs is there, an expert's output in another's row, scratch that is too small.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from smoe.bounds import INT8
from smoe.formats.registry import FORMATS
from smoe.kernels.elementwise import activation_table, is_table_of
from smoe.kernels.expert_work import Expert
from smoe.kernels.experts import Sums, TokenExperts
from smoe.kernels.matrix import Matrix, in_bf16, products_of
from smoe.kernels.spinning_pool import SpinningPool
from smoe.packing.quantiser import quantised
from tests import promised


def swiglu(wide: torch.Tensor) -> torch.Tensor:
    gate, up = wide.chunk(2, dim=-1)
    return functional.silu(gate) * up


def library(x: torch.Tensor, experts: list[tuple[torch.Tensor, torch.Tensor]], gains: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    for n, (up, down) in enumerate(experts):
        y = functional.linear(swiglu(functional.linear(x, up)), down)
        total.index_add_(0, torch.tensor([0]), (y * gains[n]).to(x.dtype))
    return total


def some_experts(count: int, hidden: int, inner: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            (torch.randn(2 * inner, hidden, generator=generator) * 0.3).bfloat16(),
            (torch.randn(hidden, inner, generator=generator) * 0.3).bfloat16(),
        )
        for _ in range(count)
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 12),
    shape=st.sampled_from([(64, 48 * 2), (192, 32), (512, 160), (1024, 512), (96, 1024), (2048, 96)]),
    parts=st.integers(1, 4),
    wide_gains=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_bits_are_the_librarys(
    count: int, shape: tuple[int, int], parts: int, wide_gains: bool, seed: int, pool: SpinningPool
) -> None:
    """In several parts, in any order, as experts arrive; the sum ascends whatever the order."""
    hidden, inner = shape
    promised.needs_products(pool, (2 * inner, hidden), (hidden, inner))
    table = activation_table(swiglu)
    assert table is not None
    kernel, experts = TokenExperts(pool, hidden, inner, table), some_experts(count, hidden, inner, seed)
    generator = torch.Generator().manual_seed(seed)
    x, gains = torch.randn(1, hidden, generator=generator).bfloat16(), torch.rand(count, generator=generator)
    gains = gains if wide_gains else gains.bfloat16()
    rows, out = torch.full((count, hidden), float("nan")).bfloat16(), torch.empty_like(x)
    order = torch.randperm(count, generator=generator).tolist()
    chosen = [Expert(in_bf16(experts[n][0].t(), experts[n][1].t()), [(0, n)]) for n in order]
    for part in range(parts - 1):
        kernel.forward(x, chosen[part::parts], rows)
    kernel.forward(x, chosen[parts - 1 :: parts], rows, Sums(gains.tolist(), [(0, count)], out))
    assert torch.equal(out, library(x, experts, gains))


FORMS = [("Q4_1", "Q3_K"), ("Q8_0", "Q8_0"), (None, None)]


@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_one_token_has_the_bits_of_the_work_it_saves(forms: tuple[str | None, str | None]) -> None:
    """Whatever experts follow each other, from whatever addresses, and after works that need more room."""
    promised.needs_machine_code()
    hidden, inner, count = 256, 256, 5
    table, generator = activation_table(swiglu), torch.Generator().manual_seed(0)
    assert table is not None
    tokens = torch.randn(6, 1, hidden, generator=generator).bfloat16()
    experts = [matrices_of(forms, hidden, inner, seed) for seed in range(8)]
    with SpinningPool(2, in_own_order=True) as pool:
        kernel, other = (TokenExperts(pool, hidden, inner, table) for _ in range(2))
        for n, x in enumerate(tokens):
            chosen = [experts[k] for k in torch.randperm(8, generator=generator)[: count - n % 2].tolist()]
            gains = torch.rand(len(chosen), generator=generator).tolist()
            ours, theirs = torch.empty_like(x), torch.empty_like(x)
            kernel.one_token(x, [matrices for matrices, _ in chosen], gains, ours)
            rows = torch.empty(len(chosen), hidden, dtype=torch.bfloat16)
            works = [Expert(matrices, [(0, place)]) for place, (matrices, _) in enumerate(chosen)]
            other.forward(x, works, rows, Sums(gains, [(0, len(chosen))], theirs))
            assert torch.equal(ours, theirs)
            if n == 2:
                pool.byte_rows(1 << 20)
                kernel.reserve(1000)


def matrices_of(forms: tuple[str | None, str | None], hidden: int, inner: int, seed: int) -> tuple[list[Matrix], Any]:
    """Gate, up and down of an expert, and what their addresses refer to."""
    [(up, down)] = some_experts(1, hidden, inner, seed)
    if forms[0] is None:
        return list(in_bf16(up.t(), down.t())), (up, down)
    parts = [(up[:inner], forms[0]), (up[inner:], forms[0]), (down, forms[1])]
    codes = [(quantised(weights.float(), FORMATS[form])[0], FORMATS[form]) for weights, form in parts]
    made = [Matrix(data.data_ptr(), data.shape[0], hidden, products_of(form, INT8)) for data, form in codes]
    return made, codes


def test_a_sum_alone(pool: SpinningPool) -> None:
    """Small numbers too, which the conversion instruction would flush, and minus zero."""
    table = activation_table(swiglu)
    assert table is not None
    rows = torch.tensor([[1e-39, -1e-39, -0.0, 3.0], [1e-40, 1e-39, -0.0, float("inf")]]).bfloat16().repeat(1, 16)
    out, gains = torch.empty(1, 64, dtype=torch.bfloat16), [0.5, 0.25]
    TokenExperts(pool, 64, 32, table).forward(out, [], rows, Sums(gains, [(0, 2)], out))
    total = torch.zeros(1, 64, dtype=torch.bfloat16)
    for n in range(2):
        total += (rows[n : n + 1] * gains[n]).bfloat16()
    assert torch.equal(out, total)
    assert out[0, 0] != 0
    assert not out.signbit()[0, 2]


def test_every_activation_that_is_a_function_of_the_gate_is_a_table() -> None:
    def gelu(wide: torch.Tensor) -> torch.Tensor:
        gate, up = wide.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up

    table = activation_table(gelu)
    assert table is not None
    assert is_table_of(table, gelu)
    assert not is_table_of(table, swiglu)


@pytest.mark.parametrize("name", ["clamped", "interleaved", "shifted"])
def test_others_are_left_to_the_library(name: str) -> None:
    """gpt_oss and its kind: limits on both sides, columns in turn, one added to up."""

    def apply_gate(wide: torch.Tensor) -> torch.Tensor:
        if name == "clamped":
            return swiglu(wide.clamp(max=7.0))
        if name == "interleaved":
            return functional.silu(wide[..., ::2]) * wide[..., 1::2]
        gate, up = wide.chunk(2, dim=-1)
        return functional.silu(gate) * (up + 1)

    assert activation_table(apply_gate) is None


def test_no_unit_begins_before_what_it_needs(pool: SpinningPool) -> None:
    """One long unit, then those that wait for it, again and again: whoever does not wait reads the last token's."""
    hidden, inner = 16384, 64
    promised.needs_products(pool, (2 * inner, hidden), (hidden, inner))
    table = activation_table(swiglu)
    assert table is not None
    kernel, [(up, down)] = TokenExperts(pool, hidden, inner, table), some_experts(1, hidden, inner, 0)
    expert, rows, out = (
        Expert(in_bf16(up.t(), down.t()), [(0, 0)]),
        *torch.empty(2, 1, hidden, dtype=torch.bfloat16),
    )
    tokens = torch.randn(300, 1, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = []
    for x in tokens:
        kernel.forward(x, [expert], rows, Sums([0.7], [(0, 1)], out))
        ours.append(out.clone())
    for x, y in zip(tokens, ours, strict=True):
        assert torch.equal(y, library(x, [(up, down)], torch.tensor([0.7])))
