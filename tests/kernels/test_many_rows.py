"""Many rows of bf16 in our own order, on every instruction set without bf16 dot products, against float64.

Would catch: rows or outputs exchanged, a lost last column, output or row, numbers read beyond an operand, bits that
hang on the number of rows or on threads, experts added to other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smoe.kernels import proof
from smoe.kernels.elementwise import activation_table
from smoe.kernels.expert_work import Expert, ExpertWork
from smoe.kernels.experts import TokenExperts
from smoe.kernels.isa import ISAS, Isa, widest
from smoe.kernels.many_rows import FEWEST_MANY_ROWS, MOST_MANY_ROWS, ManyRows, compiled, fits, instruction_set
from smoe.kernels.matrix import Matrix, in_bf16
from smoe.kernels.prompt_experts import Chosen, PromptExperts
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.tasks import FIELDS
from tests import promised

pytestmark = pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
WIDE = [isa for isa in ISAS if not isa.has_bf16_dots]
BEFORE = 64
"""The numbers before and after an operand, which are no numbers."""
NAN = float("nan")


@pytest.fixture(scope="module")
def pool() -> Iterator[SpinningPool]:
    with SpinningPool(2, in_own_order=True) as made:
        yield made


@pytest.fixture(params=promised.cells_of(WIDE))
def many(request: pytest.FixtureRequest, pool: SpinningPool) -> ManyRows:
    return ManyRows(pool, request.param)


def numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


def surrounded(inside: torch.Tensor) -> torch.Tensor:
    """The same numbers, with NaN before them and after them in memory."""
    memory = torch.full((inside.numel() + 2 * BEFORE,), NAN).bfloat16()
    found = memory[BEFORE:-BEFORE].view(inside.shape)
    found.copy_(inside)
    return found


def products(many: ManyRows, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] times weights [N, K], which overwrites nothing but the outputs."""
    memory = torch.full((x.shape[0] * weights.shape[0] + 2 * BEFORE,), NAN).bfloat16()
    out = memory[BEFORE:-BEFORE].view(x.shape[0], weights.shape[0])
    many.multiply(x, weights.t(), out, bias)
    assert bool(memory[:BEFORE].isnan().all()) and bool(memory[-BEFORE:].isnan().all())
    return out


def assert_near(ours: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """One rounding to bf16, and float32's sums."""
    exact, magnitude = x.double() @ weights.double().T, x.double().abs() @ weights.double().abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    assert bool(((ours.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5 * magnitude).all())


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 24, 25, 48, 49, 97, MOST_MANY_ROWS, MOST_MANY_ROWS + 1])
def test_every_number_of_rows(many: ManyRows, rows: int) -> None:
    x, weights = surrounded(numbers(rows, 320)), surrounded(numbers(50, 320, seed=1))
    assert_near(products(many, x, weights), x, weights)


@given(
    rows=st.integers(1, 60),
    outputs=st.integers(1, 70),
    columns=st.integers(1, 300),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_odd_shapes(pool: SpinningPool, rows: int, outputs: int, columns: int, has_bias: bool, seed: int) -> None:
    x, weights = (surrounded(numbers(n, columns, seed=seed + n)) for n in (rows, outputs))
    bias = surrounded(numbers(outputs, seed=seed + 1) * 100) if has_bias else None
    for isa in WIDE:
        if isa.is_here:
            assert_near(products(ManyRows(pool, isa), x, weights, bias), x, weights, bias)


def test_errors_are_those_of_rounding(many: ManyRows) -> None:
    x, weights = numbers(40, 2048), numbers(200, 2048, seed=1)
    exact = x.double() @ weights.double().T
    errors = [(each.double() - exact).square().mean() for each in (products(many, x, weights), exact.bfloat16())]
    assert errors[0] <= 1.01 * errors[1]


def test_what_is_no_number_shows_where_it_belongs(many: ManyRows) -> None:
    x, weights, bias = numbers(30, 100), numbers(45, 100, seed=1), numbers(45, seed=2)
    x[17, 99], weights[44, 3], bias[5] = NAN, torch.inf, NAN
    bad = ~products(many, x, weights, bias).isfinite()
    assert bool(bad[17].all()) and bool(bad[:, 44].all()) and bool(bad[:, 5].all())
    assert bad.sum() == 45 + 2 * 30 - 2


def test_a_rows_bits_hang_on_nothing_else(many: ManyRows) -> None:
    """On the number of rows, the other rows, the outputs computed with it, and the threads."""
    x, weights = numbers(70, 1000), numbers(100, 1000, seed=1)
    whole = products(many, x, weights)
    for rows in (1, 9, 33):
        assert torch.equal(products(many, x[:rows], weights), whole[:rows])
        assert torch.equal(products(many, x[-rows:].clone(), weights), whole[-rows:])
    assert torch.equal(products(many, x, weights[:33]), whole[:, :33])
    with SpinningPool(1, in_own_order=True) as alone:
        assert torch.equal(products(ManyRows(alone, many.isa), x, weights), whole)


def test_what_the_kernel_supports() -> None:
    assert fits(numbers(5, 7).t()) and fits(numbers(5, 7).t(), numbers(5))
    assert not fits(numbers(5, 7)) and not fits(numbers(5, 7).float().t())
    assert not fits(numbers(5, 7).t(), numbers(5).float()) and not fits(numbers(5, 7).t(), numbers(10)[::2])


def test_the_proof_notices_a_wrong_product(many: ManyRows, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = many.pool
    monkeypatch.setattr(pool, "many", many)
    matrix, bias = numbers(512, 2048).t(), numbers(512, seed=2)
    assert proof.agrees_on_many_rows(pool, matrix) and proof.agrees_on_many_rows(pool, matrix, bias)
    assert not proof.agrees_on_many_rows(pool, matrix.contiguous())
    others, multiply = matrix.clone(memory_format=torch.preserve_format), many.multiply
    others[-1] = 0  # a lost last number is an error of two in a hundred
    monkeypatch.setattr(many, "multiply", lambda x, _, out, bias: multiply(x, others[:, : out.shape[1]], out, bias))
    assert not proof.agrees_on_many_rows(pool, matrix) and not proof.agrees_on_many_rows(pool, matrix, bias)


def test_a_pool_has_it_where_the_library_is_slow(pool: SpinningPool) -> None:
    isa = instruction_set()
    assert (pool.many is None) == (isa is None)
    if isa is not None:
        assert (pool.few_rows, pool.most_own_rows) == (FEWEST_MANY_ROWS - 1, MOST_MANY_ROWS)
    with SpinningPool(1, has_bf16=False) as other:
        assert other.many is None


@pytest.mark.parametrize("isa", promised.cells_of(WIDE))
def test_experts_have_packed_rows_of_their_own(isa: Isa, pool: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads compute several experts at once."""
    monkeypatch.setattr(pool, "many", ManyRows(pool, isa))
    monkeypatch.setattr(pool, "few_rows", 8)
    shape, counts = TokenExperts(pool, 64, 96, torch.empty(1 << 16, dtype=torch.bfloat16)), (9, 3, 40, 17)
    experts = [Expert([Matrix(0, 192, 64), Matrix(0, 64, 96)], [(n, n) for n in range(count)]) for count in counts]
    pool.row_lists.begin(1000)
    work = ExpertWork(shape, 0, 0, experts)
    work.pack_rows(1 << 20)
    work.ups()
    tasks = [work.fields[n : n + FIELDS] for n in range(0, len(work.fields), FIELDS)]
    begins = [task[10] for task in tasks if task[7] == compiled(isa).pack]
    sizes = [4 * 96 * isa.lanes * -(-count // isa.lanes) for count in counts if count > 8]
    assert begins == [1 << 20, (1 << 20) + sizes[0], (1 << 20) + sizes[0] + sizes[1]]


@pytest.mark.parametrize("isa", promised.cells_of(WIDE))
def test_experts_of_a_prompt(isa: Isa, pool: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of one token, of few and of many, and one that more tokens have chosen than are packed at once."""
    monkeypatch.setattr(pool, "many", ManyRows(pool, isa))
    hidden, inner, tokens = 192, 96, MOST_MANY_ROWS + 90
    activate: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.silu
    gated = activation_table(lambda wide: activate(wide.chunk(2, -1)[0]) * wide.chunk(2, -1)[1])
    assert gated is not None
    x, exact = numbers(tokens, hidden), torch.zeros(tokens, hidden, dtype=torch.float64)
    prompt, kept = PromptExperts(TokenExperts(pool, hidden, inner, gated), x), []
    for n, count in enumerate((1, 7, 40, 9, 200, tokens, 12)):
        up, down = numbers(2 * inner, hidden, seed=n) * 0.1, numbers(hidden, inner, seed=n + 50) * 0.1
        chosen = torch.randperm(tokens, generator=torch.Generator().manual_seed(n))[:count]
        if not prompt.has_room(count):
            prompt.flush()
        prompt.add(Chosen(in_bf16(up.t(), down.t()), chosen.numpy(), np.full(count, 0.5 + n, np.float32)))
        kept += [up, down]
        wide = (x[chosen].double() @ up.double().T).bfloat16()
        middle = activate(wide[:, :inner]) * wide[:, inner:]
        exact[chosen] += (0.5 + n) * (middle.double() @ down.double().T).bfloat16().double()
    prompt.flush()
    # neighbours in bf16 between the products differ by up to 2 ** -8
    assert bool(((prompt.total.double() - exact).abs() <= 0.02 * exact.abs().max()).all())
    assert float((prompt.total.double() - exact).square().mean() / exact.square().mean()) < 2.0**-16
