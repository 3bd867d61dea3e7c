"""Generated products of every format on every instruction set that this CPU has, against float64.

Would catch: a wrong lane, a lost remainder of rows, a bias or minimum with the wrong sign, a sum in 16 bits.
"""

from __future__ import annotations

import pytest
import torch

from smoe.formats.base import Format
from smoe.kernels.isa import Isa
from smoe.kernels.jit import is_available
from tests.formats.blocks import random_rows
from tests.kernels.products import columns_of, compiled, exact, multiplied, numbers_of

pytestmark = pytest.mark.skipif(not is_available(), reason="needs llvmlite")
ROWS = 23


@pytest.fixture
def functions(form: Format, isa: Isa) -> dict[object, object]:
    """By the number of rows of x; "unpack"."""
    return compiled(form, isa)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_errors_are_below_those_of_torch(form, isa, functions, blocks: int) -> None:
    """Against torch's bf16 product on the dequantised weights, on average; and no output is far off."""
    columns = columns_of(form, blocks)
    data = random_rows(form, ROWS, columns, blocks)
    numbers = numbers_of(form, data)
    for rows in (1, 2, 4):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(blocks)).bfloat16()
        ours, wanted = multiplied(functions, data, x, columns, 0, ROWS), exact(form, data, x)
        theirs = x @ numbers.bfloat16().T
        errors = [float((each.double() - wanted).square().mean().sqrt()) for each in (ours, theirs)]
        assert errors[0] <= errors[1], (rows, errors)
        magnitude = x.double().abs() @ numbers.abs().T
        assert bool(((ours.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-5 * magnitude).all()), rows


def test_a_share_of_the_outputs_touches_nothing_else(form, isa, functions) -> None:
    columns = columns_of(form, 1)
    data, x = random_rows(form, ROWS, columns, 3), torch.ones(1, columns, dtype=torch.bfloat16)
    whole = multiplied(functions, data, x, columns, 0, ROWS)
    for begin, end in ((0, 0), (0, 3), (5, 10), (ROWS - 1, ROWS)):
        part = multiplied(functions, data, x, columns, begin, end)
        assert torch.equal(part[:, begin:end], whole[:, begin:end]), "a function of the input alone"
        assert bool(part[:, :begin].isnan().all()) and bool(part[:, end:].isnan().all())


def test_a_bias_is_added_before_rounding(form, isa, functions) -> None:
    columns = columns_of(form, 1)
    data = random_rows(form, ROWS, columns, 4)
    x, bias = torch.randn(1, columns).bfloat16(), torch.randn(ROWS).bfloat16()
    ours = multiplied(functions, data, x, columns, 0, ROWS, bias)
    wanted = exact(form, data, x) + bias.double()
    assert torch.allclose(ours.double(), wanted, rtol=2.0**-8, atol=1e-4)


def test_zero_weights_and_what_is_no_number(form, isa, functions) -> None:
    columns = columns_of(form, 2)
    data = random_rows(form, ROWS, columns, 5, spread=0.0)
    x = torch.randn(1, columns).bfloat16()
    if form.scale.kind != "E8M0":
        assert not bool(multiplied(functions, data, x, columns, 0, ROWS).any())
    x[0, 0] = float("nan")
    assert bool(multiplied(functions, data, x, columns, 0, ROWS).isnan().all())


def test_unpacked_rows_are_the_decoders(form, isa, functions) -> None:
    columns = columns_of(form, 3)
    data = random_rows(form, ROWS, columns, 6)
    out = torch.zeros(ROWS, columns, dtype=torch.bfloat16)
    functions["unpack"](out.data_ptr(), data.ctypes.data, None, None, 2, ROWS, columns)
    wanted = numbers_of(form, data).bfloat16()
    assert not bool(out[:2].any())
    different = out[2:] != wanted[2:]  # one rounding of scale * code - offset less than the decoder has
    assert float(different.float().mean()) < 1e-3
    assert torch.allclose(out[2:].float(), wanted[2:].float(), rtol=2.0**-7, atol=1e-6)


def test_products_do_not_hang_on_the_number_of_rows_of_the_matrix(form, isa, functions) -> None:
    """Four at once and one at a time give the same bits."""
    columns = columns_of(form, 4)
    data = random_rows(form, 8, columns, 7)
    x = torch.randn(1, columns).bfloat16()
    whole = multiplied(functions, data, x, columns, 0, 8)
    for n in range(8):
        assert torch.equal(multiplied(functions, data, x, columns, n, n + 1)[:, n], whole[:, n])
