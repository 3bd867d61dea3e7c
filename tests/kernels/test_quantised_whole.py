"""Products with activations in 8 bits: every format on every instruction set that this CPU has, against NumPy.

Would catch: a product that is cut off at 16 bits, bytes of x in another order than codes, a zero that is not taken
back, a group's scale on its neighbour, a rounding of x that the reference does not have.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smoe.bounds import BF16, INT8
from smoe.formats.activations import fits, in_8_bits
from smoe.formats.base import Bits, Format
from smoe.formats.registry import FORMATS
from smoe.kernels.isa import ISAS_OF, Isa
from smoe.kernels.jit import is_available
from smoe.kernels.matrix import products_of
from tests.formats.blocks import random_rows
from tests.kernels.products import columns_of, compiled, exact, multiplied

pytestmark = pytest.mark.skipif(not is_available(), reason="needs llvmlite")
ROWS = 11


@pytest.fixture(scope="session", params=ISAS_OF[INT8], ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    if not request.param.is_here:
        pytest.skip(f"this CPU has no {request.param.name}")
    return request.param


@pytest.fixture(scope="session", params=[form for form in FORMATS.values() if fits(form)], ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> Format:
    return request.param


def test_other_formats_are_multiplied_as_without_it() -> None:
    others = [form for form in FORMATS.values() if not fits(form)]
    assert {form.name for form in others} == {"FP8", "W8_32", "W8_64", "W8_128"}
    for form in others:
        found = products_of(form, INT8)
        assert found is None or found.activations == BF16


@pytest.fixture
def functions(form: Format, isa: Isa) -> dict[object, object]:
    return compiled(form, isa, INT8)


def check(form: Format, data, x: torch.Tensor, ours: torch.Tensor) -> None:
    """Ours is the product of x in 8 bits, rounded once."""
    seen = torch.from_numpy(in_8_bits(form, x.float().numpy()))
    wanted, numbers = exact(form, data, seen), torch.from_numpy(form.decode(data)).double()
    offsets = numbers.abs().amax() * seen.abs().sum(-1, keepdim=True)  # minimums are subtracted from larger sums
    assert bool(((ours.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 3e-6 * offsets + 1e-38).all())


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_products_are_those_of_x_in_8_bits(form, functions, rows: int, blocks: int) -> None:
    columns = columns_of(form, blocks)
    data = random_rows(form, ROWS, columns, blocks)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(blocks)).bfloat16()
    check(form, data, x, multiplied(functions, data, x, columns, 0, ROWS))


@pytest.mark.parametrize("value", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_and_bytes_are_not_cut_off(form, functions, value: int, sign: int) -> None:
    columns = columns_of(form, 2)
    data = random_rows(form, ROWS, columns, 6)
    blocks = data.reshape(-1, form.nbytes)
    for group in form.groups:
        for run in group.runs:
            for field in run.fields:
                step = 8 if isinstance(field, Bits) else 1
                blocks[:, field.byte : field.byte + run.numbers // step] = value
    x = torch.full((1, columns), 1.5 * sign).bfloat16()
    check(form, data, x, multiplied(functions, data, x, columns, 0, ROWS))


NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-3, -300.0, 1e4, -3e20, 1e-40, -1e-38, 3e-31, 0.996, -0.5])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(NUMBERS, min_size=1, max_size=40), seed=st.integers(0, 2**16))
def test_outliers_zeros_and_what_is_almost_zero(form, functions, values: list[float], seed: int) -> None:
    columns = columns_of(form, 2)
    picked = np.random.default_rng(seed).choice(values, columns)
    x = torch.from_numpy(picked).float().bfloat16().unsqueeze(0)
    data = random_rows(form, ROWS, columns, seed)
    check(form, data, x, multiplied(functions, data, x, columns, 0, ROWS))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_not_hidden(form, functions, value: float) -> None:
    columns = columns_of(form, 2)
    x = torch.randn(1, columns).bfloat16()
    x[0, columns // 2 + 3] = value
    ours = multiplied(functions, random_rows(form, ROWS, columns, 5), x, columns, 0, ROWS)
    assert not bool(ours.isfinite().any())


def test_a_bias_is_added_before_rounding(form, functions) -> None:
    columns = columns_of(form, 1)
    data, bias = random_rows(form, ROWS, columns, 4), torch.randn(ROWS).bfloat16()
    x = torch.zeros(1, columns, dtype=torch.bfloat16)
    assert torch.equal(multiplied(functions, data, x, columns, 0, ROWS, bias)[0], bias)


def test_bits_do_not_hang_on_what_is_computed_together(form, functions) -> None:
    """Rows of the matrix and rows of x alone, or several at once."""
    columns = columns_of(form, 4)
    data, x = random_rows(form, 8, columns, 7), torch.randn(4, columns).bfloat16()
    single = torch.cat([multiplied(functions, data, x[n : n + 1], columns, 0, 8) for n in range(4)])
    for n in range(8):
        assert torch.equal(multiplied(functions, data, x[:1], columns, n, n + 1)[:, n], single[:1, n])
    assert torch.equal(multiplied(functions, data, x, columns, 0, 8), single)
    assert torch.equal(multiplied(functions, data, x[:2], columns, 0, 8), single[:2])
