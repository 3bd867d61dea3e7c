"""Activations in 8 bits: the reference for what kernels make of a row before they multiply it (a lossy choice).

    group of x    ->    scale = largest magnitude / 127,    bytes = round(x * (127 / largest magnitude))

A group is as many numbers as share a scale in the matrix, so that a product of groups is one of whole numbers.
llama.cpp rounds the same way, in groups of 32 or 256 numbers (its Q8_0 and Q8_K).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from smoe.formats.base import Floats, Format

LARGEST = 127.0
"""Bytes are -127 ... 127."""
LEAST = 2.0**-100
"""Smaller magnitudes count as zero: what 127 would have to be divided by is no number of float32."""

MOST_CODE = 127
"""The largest unsigned code of which two, times 127 each, are a number of 16 bits: a CPU may add them so."""


def fits(form: Format) -> bool:
    """Whether the codes of a format are whole numbers that bytes of x can be multiplied with."""
    return form.is_signed or (not (form.is_float8 or form.reals) and form.most <= MOST_CODE)


def in_8_bits(form: Format, x: Floats) -> npt.NDArray[np.float64]:
    """x [..., K] as products with a matrix of this format see it, [..., K] in float64.

    A group with something that is not finite becomes NaN.
    """
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, form.numbers // len(form.groups))
    largest = np.abs(groups).max(-1, keepdims=True)
    is_little = largest < LEAST
    with np.errstate(all="ignore"):
        scale = np.where(is_little, np.float32(0), largest / np.float32(LARGEST))
        gain = np.where(is_little, np.float32(0), np.float32(LARGEST) / largest)
        whole = np.rint(groups * gain)
        meant: npt.NDArray[np.float64] = whole.astype(np.float64) * scale
    return meant.reshape(x.shape)
