"""Machine code on interleaved rows: every format, with registers of 8 and of 16 numbers, against the reference and
against the same products on rows of the file. Would catch: a word of another row, bytes outside the words that are read
as a code, a last group of rows that is read beyond the matrix.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smoe.bounds import INT8
from smoe.formats.activations import fits
from smoe.formats.base import Format
from smoe.formats.interleaved import interleave, interleaved, words_of
from smoe.formats.registry import FORMATS
from smoe.kernels import matrix
from smoe.kernels.byte_products import TILE_COLUMNS
from smoe.kernels.isa import AVX2, AVX512_VNNI, Isa, widest
from smoe.kernels.jit import is_available
from smoe.kernels.matrix import Matrix, in_memory, products_of
from tests import promised
from tests.formats.blocks import random_rows
from tests.kernels.conftest import LIKE_OTHERS
from tests.kernels.products import compiled_in_bytes, gains_by_interleaving, multiplied_in_bytes

pytestmark = pytest.mark.skipif(not is_available(), reason="needs llvmlite")
FORMS = [form for form in FORMATS.values() if fits(form) and words_of(form) and form.name not in LIKE_OTHERS]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("isa", promised.cells_of([AVX512_VNNI, AVX2]), ids=lambda isa: isa.name)
def test_products_have_the_bits_of_those_on_rows_of_the_file(form: Format, isa: Isa) -> None:
    """More columns than a tile has, and an odd number of groups of rows."""
    columns = -(-(TILE_COLUMNS + form.numbers) // form.numbers) * form.numbers
    together, outputs = interleaved(form, isa.lanes), 3 * isa.lanes
    data = random_rows(form, outputs, columns, 2)
    functions, mine = compiled_in_bytes(together, isa), data.copy()
    functions["interleave"](None, mine.ctypes.data, None, None, 0, outputs, columns)
    assert np.array_equal(mine, interleave(together, data))
    x, bias = torch.randn(5, columns, generator=torch.Generator().manual_seed(3)).bfloat16(), torch.randn(outputs)
    for rows in (1, 2, 5):
        ours = multiplied_in_bytes(together, functions, mine, x[:rows], bias=bias.bfloat16())
        wanted = multiplied_in_bytes(form, compiled_in_bytes(form, isa), data, x[:rows], bias=bias.bfloat16())
        assert torch.equal(ours, wanted)
    some = slice(isa.lanes, 2 * isa.lanes)
    alone = multiplied_in_bytes(together, functions, mine, x[:2], some.start, some.stop, bias=bias.bfloat16())
    assert torch.equal(alone[:, some], ours[:2, some])


def test_only_what_gains_is_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = widest(INT8)
    promised.needs(isa is not None, "no kernels for this CPU")
    assert isa is not None
    form = FORMATS["Q4_K"]
    assert (in_memory(form, 512, INT8).rows > 1) == isa.interleaves
    gains_by_interleaving(monkeypatch)
    assert in_memory(form, 512, INT8) == interleaved(form, isa.lanes)
    assert in_memory(form, 513, INT8) is form, "a group of rows would be incomplete"
    assert in_memory(form, 512, "bf16") is form and in_memory(FORMATS["FP8"], 512, INT8) is FORMATS["FP8"]


def test_a_matrix_is_interleaved_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    promised.needs(widest(INT8) is not None, "no kernels for this CPU")
    gains_by_interleaving(monkeypatch)
    form = in_memory(FORMATS["Q6_K"], 64, INT8)
    data = random_rows(FORMATS["Q6_K"], 64, 512, 4)
    wanted = interleave(form, data)
    matrix.interleave(form, Matrix(data.ctypes.data, 64, 512, products_of(form, INT8)))
    assert np.array_equal(data, wanted)
