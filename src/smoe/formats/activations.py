"""The reference for rounding activations to 8 bits before products (a lossy setting that users choose).

    for each group of x:    scale = largest magnitude / 127,    bytes = round(x * (127 / largest magnitude))

A group has as many elements as share a scale in the matrix, so a product of two groups is a product of integers.
llama.cpp rounds in the same way, in groups of 32 or 256 (its types Q8_0 and Q8_K).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from smoe.formats.base import Floats, Format

LARGEST = 127.0
"""The largest magnitude of a rounded activation, which is a byte from -127 to 127."""
LEAST = 2.0**-100
"""The magnitude below which a group is rounded to zero, because 127 divided by it would exceed float32."""

MOST_CODE = 127
"""The largest unsigned code that can be multiplied with bytes on CPUs that add two products in 16 bits."""


def fits(form: Format) -> bool:
    """Return whether a format's codes are integers that can be multiplied with activations in 8 bits."""
    return form.is_signed or (not (form.is_float8 or form.reals) and form.most <= MOST_CODE)


def in_8_bits(form: Format, x: Floats) -> npt.NDArray[np.float64]:
    """Return activations x [..., K] after rounding to 8 bits for a matrix of the format `form`, as float64 [..., K].

    Each group of activations has one scale. If an element of a group is not finite, the whole group becomes NaN.
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
