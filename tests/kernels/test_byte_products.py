"""Products with activations in 8 bits: every format on every instruction set that this CPU has, against NumPy.

Would catch: a product that is cut off at 16 bits, bytes of x in another order than codes, a zero that is not taken
back, a group's scale on its neighbour, a rounding of x that the reference does not have, a tile's end, a cache line
without a prefetch.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llvmlite import ir
from torch.nn import functional

from smoe.bounds import BF16, INT8
from smoe.formats.activations import fits, in_8_bits
from smoe.formats.base import Bits, Format, Points
from smoe.formats.registry import FORMATS
from smoe.kernels import byte_products
from smoe.kernels.byte_products import TILE_COLUMNS
from smoe.kernels.elementwise import activation_table
from smoe.kernels.isa import AVX2, ISAS_OF, Isa
from smoe.kernels.jit import is_available
from smoe.kernels.matrix import products_of
from tests import promised
from tests.formats.blocks import random_rows
from tests.kernels.conftest import LIKE_OTHERS
from tests.kernels.products import columns_of, compiled_in_bytes, exact, gated_in_bytes, multiplied_in_bytes, numbers_of

pytestmark = pytest.mark.skipif(not is_available(), reason="needs llvmlite")
ROWS = 11


@pytest.fixture(scope="session", params=promised.cells_of(ISAS_OF[INT8]), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    return request.param


@pytest.fixture(
    scope="session",
    params=[form for form in FORMATS.values() if fits(form) and form.name not in LIKE_OTHERS],
    ids=lambda form: form.name,
)
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
    return compiled_in_bytes(form, isa)


def check(form: Format, data, x: torch.Tensor, ours: torch.Tensor) -> None:
    """Ours is the product of x in 8 bits, rounded once."""
    seen = torch.from_numpy(in_8_bits(form, x.float().numpy()))
    wanted = exact(form, data, seen)
    offsets = numbers_of(form, data).abs().amax() * seen.abs().sum(
        -1, keepdim=True
    )  # minimums are subtracted from larger sums
    assert bool(((ours.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 3e-6 * offsets + 1e-38).all())


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_products_are_those_of_x_in_8_bits(form, functions, blocks: int) -> None:
    columns = columns_of(form, blocks)
    data = random_rows(form, ROWS, columns, blocks)
    for rows in (1, 2, 3, 4, 5, 7, 9):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(blocks)).bfloat16()
        check(form, data, x, multiplied_in_bytes(form, functions, data, x))


@pytest.mark.parametrize("value", [0x00, 0x7F, 0x80, 0xFF])
def test_the_largest_codes_and_bytes_are_not_cut_off(form, functions, value: int) -> None:
    columns = columns_of(form, 2)
    data = random_rows(form, ROWS, columns, 6)
    blocks = data.reshape(-1, form.nbytes)
    for group in form.groups:
        for run in group.runs:
            for field in run.fields:
                if isinstance(field, Points):
                    for part in (part for fields in (*field.indices, *field.signs) for part in fields):
                        blocks[:, part.byte] = value
                    continue
                step = 8 if isinstance(field, Bits) else 1
                blocks[:, field.byte : field.byte + run.numbers // step] = value
    for number in (1.5, -1.5):
        x = torch.full((1, columns), number).bfloat16()
        check(form, data, x, multiplied_in_bytes(form, functions, data, x))


NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-3, -300.0, 1e4, -3e20, 1e-40, -1e-38, 3e-31, 0.996, -0.5])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(NUMBERS, min_size=1, max_size=40), seed=st.integers(0, 2**16))
def test_outliers_zeros_and_what_is_almost_zero(form, functions, values: list[float], seed: int) -> None:
    columns = columns_of(form, 2)
    picked = np.random.default_rng(seed).choice(values, columns)
    x = torch.from_numpy(picked).float().bfloat16().unsqueeze(0)
    data = random_rows(form, ROWS, columns, 9)
    check(form, data, x, multiplied_in_bytes(form, functions, data, x))


def test_what_is_no_number_is_not_hidden(form, functions) -> None:
    columns = columns_of(form, 2)
    for value in (float("nan"), float("inf"), -float("inf")):
        x = torch.randn(1, columns).bfloat16()
        x[0, columns // 2 + 3] = value
        ours = multiplied_in_bytes(form, functions, random_rows(form, ROWS, columns, 5), x)
        assert not bool(ours.isfinite().any()), value


def test_a_bias_is_added_before_rounding(form, functions) -> None:
    columns = columns_of(form, 1)
    data, bias = random_rows(form, ROWS, columns, 4), torch.randn(ROWS).bfloat16()
    x = torch.zeros(1, columns, dtype=torch.bfloat16)
    assert torch.equal(multiplied_in_bytes(form, functions, data, x, bias=bias)[0], bias)


def test_bits_depend_on_nothing_that_is_computed_with_them(form, functions) -> None:
    """Rows of the matrix and rows of x alone, or several at once; more columns than a tile has."""
    columns = columns_of(form, -(-(TILE_COLUMNS + form.numbers) // form.numbers))
    data, x = random_rows(form, 19, columns, 7), torch.randn(11, columns).bfloat16()
    single = torch.cat([multiplied_in_bytes(form, functions, data, row) for row in x.split(1)])
    check(form, data, x, single)
    for n in (0, 7, 18):
        alone = multiplied_in_bytes(form, functions, data, x[:2], n, n + 1)
        assert torch.equal(alone[:, n], single[:2, n])
        assert bool(alone[:, [i for i in range(19) if i != n]].isnan().all()), "outputs that were not asked for"
    for count in (2, 3, 4, 5, 8, 9, 11):
        assert torch.equal(multiplied_in_bytes(form, functions, data, x[:count]), single[:count])


def test_a_gated_row_is_what_the_library_makes_of_it_in_8_bits(form, functions) -> None:
    columns = columns_of(form, 2)
    table = activation_table(lambda both: functional.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1])
    assert table is not None
    wide = torch.randn(3, 2 * columns).bfloat16()
    gate, up = wide.chunk(2, -1)
    data = random_rows(form, ROWS, columns, 8)
    ours = gated_in_bytes(form, functions, data, wide, table)
    assert torch.equal(ours, multiplied_in_bytes(form, functions, data, functional.silu(gate) * up))


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if fits(form)], ids=lambda form: form.name)
def test_every_cache_line_of_a_block_is_prefetched(form: Format) -> None:
    module = ir.Module()
    byte_products.add_function(module, AVX2, form, ("*given", "*w", "*out", "*bias", "begin", "end", "K"))
    calls = str(module).count('call void @"llvm.prefetch')
    blocks = 1 + len(byte_products.FEW_TOGETHER) + byte_products.STRIPS  # for one row, for a few, and for many
    first = 2  # one loop before each of them
    assert calls >= first + blocks * math.ceil(form.nbytes * AVX2.lanes / 64)
