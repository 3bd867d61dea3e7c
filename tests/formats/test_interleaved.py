"""Interleaved rows, against the definition byte by byte. Would catch: words of two rows in each other's place, bytes
outside the words that are lost, a format whose codes would begin within a word.
"""

from __future__ import annotations

import numpy as np
import pytest

from smoe.formats.base import Field, Format
from smoe.formats.interleaved import as_in_file, in_rows, interleave, interleaved, words_of
from smoe.formats.plain import PLAIN
from smoe.formats.registry import FORMATS
from tests.formats.blocks import random_rows

ROWS = 8
FORMS = [form for form in FORMATS.values() if words_of(form)]
every = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


def place_of(form: Format, row: int, byte: int) -> int:
    """Where a byte of a row's block is in the interleaved block."""
    layout = words_of(form)
    assert layout is not None
    if layout.others <= byte < layout.others + layout.other_bytes:
        return 4 * ROWS * layout.number + layout.other_bytes * row + byte - layout.others
    word, inside = divmod(byte - layout.begin, 4)
    return 4 * (ROWS * word + row) + inside


@every
def test_every_byte_is_where_the_definition_says(form: Format) -> None:
    blocks = 3
    data = random_rows(form, 2 * ROWS, blocks * form.numbers, 1)
    together = interleaved(form, ROWS)
    found = interleave(together, data).reshape(2, blocks, ROWS * form.nbytes)
    for row in range(ROWS):
        places = [place_of(form, row, byte) for byte in range(form.nbytes)]
        for group in range(2):
            assert (found[group][:, places] == data[group * ROWS + row].reshape(blocks, form.nbytes)).all()
    assert (in_rows(together, found.reshape(data.shape)) == data).all()
    assert as_in_file(together) == form and in_rows(form, data) is data


@every
def test_codes_begin_with_words(form: Format) -> None:
    layout = words_of(form)
    assert layout is not None and layout.number * 4 + layout.other_bytes == form.nbytes
    for group in form.groups:
        for run in group.runs:
            assert all((each.byte - layout.begin) % 4 == 0 for each in run.fields if isinstance(each, Field))
    assert [layout.word_of(byte) for byte in range(form.nbytes)].count(-1) == layout.other_bytes


def test_what_has_no_blocks_is_not_interleaved() -> None:
    assert not any(words_of(form) for form in PLAIN.values())
    assert words_of(FORMATS["Q6_K"]) == (0, 52, 208, 2) and words_of(FORMATS["Q8_0"]) == (2, 8, 0, 2)
    assert np.array_equal(in_rows(PLAIN["F32"], np.zeros((1, 4), np.uint8)), np.zeros((1, 4)))
