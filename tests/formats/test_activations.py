"""Activations in 8 bits against the gguf package's own rounding of numbers to 8 bits.

Would catch: another scale, groups that are cut elsewhere, an outlier that reaches beyond its group.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from smoe.formats.activations import in_8_bits
from smoe.formats.registry import FORMATS


def test_groups_of_32_are_those_of_gguf() -> None:
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    x[0, 5], x[1, 40:70] = 1000.0, 0.0
    coded = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
    theirs = gguf.quants.dequantize(coded, gguf.GGMLQuantizationType.Q8_0)
    ours = in_8_bits(FORMATS["Q4_0"], x)
    largest = np.abs(x.reshape(3, -1, 32)).max(-1).repeat(32, -1)
    # their scale is rounded to fp16, and with it a number that lies between two bytes may go the other way
    assert (np.abs(ours - theirs) <= largest * (2.0**-11 + 1e-6) + 1e-12).mean() > 0.99
    assert (np.abs(ours - theirs) <= 1.01 * largest / 127).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_number_moves_by_half_a_step_of_its_group_at_most(name: str) -> None:
    form = FORMATS[name]
    size = form.numbers // len(form.groups)
    x = np.random.default_rng(1).standard_normal((2, 2 * form.numbers)).astype(np.float32)
    x[0, 3] = 100.0
    step = np.abs(x.reshape(2, -1, size)).max(-1).repeat(size, -1) / 127
    assert (np.abs(in_8_bits(form, x) - x) <= 0.5001 * step).all()


def test_what_is_almost_zero_is_zero_and_what_is_no_number_stays_none() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, 0], x[0, 32] = 1e-35, np.inf
    ours = in_8_bits(FORMATS["Q8_0"], x)
    assert not ours[0, :32].any() and np.isnan(ours[0, 32:]).all()
