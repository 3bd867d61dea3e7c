"""Rows of a quantized matrix whose blocks are interleaved in memory, so that kernels load the same word of several rows
as one register.

    in the file     row a   | a0 a1 a2 ...  | end of a |
                    row b   | b0 b1 b2 ...  | end of b |        words of four bytes
    interleaved             | a0 b0 ... | a1 b1 ... | a2 b2 ... | end of a | end of b | ...

The interleaved blocks of `Format.rows` rows take the place of these rows, so sizes and addresses of groups of rows do
not change. Where the codes of a block begin after one or two bytes, these bytes are stored at the end.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from smoe.formats.base import Bytes, Field, Format

WORD_BYTES = 4
_LEAST_WORDS = 4
"""The least number of words of a block: 16 codes are unpacked at a time."""


class Words(NamedTuple):
    """The division of a block into words and one or two other bytes."""

    begin: int
    """The byte at which the words begin."""
    number: int
    others: int
    """The first of the other bytes, which are before or after the words."""
    other_bytes: int

    def word_of(self, byte: int) -> int:
        """Return the number of the word that contains a byte of the block; -1 for the other bytes."""
        is_other = self.others <= byte < self.others + self.other_bytes
        return -1 if is_other else (byte - self.begin) // WORD_BYTES


@functools.cache
def words_of(form: Format) -> Words | None:
    """Return how the blocks of a format are divided into words. None if its codes do not begin with a word, so that
    rows cannot be interleaved."""
    if form.reals:
        return None
    count, other = divmod(form.nbytes, WORD_BYTES)
    ways = [Words(0, count, WORD_BYTES * count, other), Words(other, count, 0, other)]
    fits = (way for way in ways if other <= 2 and count >= _LEAST_WORDS and _fits(form, way))
    return next(fits, None)


def interleaved(form: Format, rows: int) -> Format:
    """Return the format of a matrix in which the blocks of `rows` rows are interleaved."""
    assert words_of(form) is not None, form.name
    return replace(form, rows=rows)


def as_in_file(form: Format) -> Format:
    return replace(form, rows=1)


def interleave(form: Format, data: Bytes) -> Bytes:
    """Return the rows [n, bytes of a row] of a file in the layout of an interleaved format. `n` must be a multiple of
    `form.rows`. This is the reference for machine code."""
    words, other = _parts(form, data.reshape(len(data) // form.rows, form.rows, -1, form.nbytes))
    groups, _, blocks, _ = other.shape
    words = words.reshape(groups, form.rows, blocks, -1, WORD_BYTES).transpose(0, 2, 3, 1, 4)
    parts = words.reshape(groups, blocks, -1), other.transpose(0, 2, 1, 3).reshape(groups, blocks, -1)
    return np.concatenate(parts, axis=2).reshape(data.shape)


def in_rows(form: Format, data: Bytes) -> Bytes:
    """Return rows [n, bytes of a row] of an interleaved format in the layout of the file; the inverse of
    `interleave`. A format that is not interleaved is returned as it is."""
    if form.rows == 1:
        return data
    layout = words_of(form)
    assert layout is not None, form.name
    groups, rows = len(data) // form.rows, form.rows
    blocks = data.reshape(groups, -1, rows * form.nbytes)
    count, end = blocks.shape[1], rows * WORD_BYTES * layout.number
    words = blocks[:, :, :end].reshape(groups, count, layout.number, rows, WORD_BYTES).transpose(0, 3, 1, 2, 4)
    other = blocks[:, :, end:].reshape(groups, count, rows, layout.other_bytes).transpose(0, 2, 1, 3)
    out = np.empty((groups, rows, count, form.nbytes), np.uint8)
    to_words, to_other = _parts(form, out)
    to_words[:] = words.reshape(to_words.shape)
    to_other[:] = other
    return out.reshape(data.shape)


def _parts(form: Format, blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Return the words and the other bytes of blocks [..., nbytes], as views."""
    layout = words_of(form)
    assert layout is not None, form.name
    words = blocks[..., layout.begin : layout.begin + WORD_BYTES * layout.number]
    return words, blocks[..., layout.others : layout.others + layout.other_bytes]


def _fits(form: Format, layout: Words) -> bool:
    """Return whether the codes of 16 elements always begin with a word."""
    fields = [field for group in form.groups for run in group.runs for field in run.fields]
    begins = [field.byte - layout.begin for field in fields if isinstance(field, Field)]
    return all(begin >= 0 and begin % WORD_BYTES == 0 for begin in begins)
