"""Make blocks of a quantised format: random ones with a given standard deviation, or those of given numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from smoe.formats.base import Bytes, Floats, Format, Scalar
from smoe.formats.encode import Blocks, encode

_SAMPLE = 4096
"""The number of blocks by which the standard deviation is measured."""


def random_blocks(form: Format, count: int, spread: float, chance: np.random.Generator) -> Bytes:
    """Return blocks of random codes, uint8 [count, bytes of a block], whose numbers have the mean 0 and the standard
    deviation `spread`."""
    blocks = chance.integers(0, 256, (count, form.nbytes), dtype=np.uint8)
    if form.scale.kind == "E8M0":
        _put_scales(form, blocks, spread)
        return blocks
    _put(blocks, form.scale, 1.0)
    if form.minimum is not None:
        _put(blocks, form.minimum, 0.0)
    sample = blocks[:_SAMPLE].copy()
    unshifted = form.decode(sample)
    minimum = 0.0
    if form.minimum is not None:
        _put(sample, form.minimum, 1.0)
        minimum = float(unshifted.mean() / (unshifted - form.decode(sample)).mean())
        _put(sample, form.minimum, minimum)
    scale = spread / float(form.decode(sample).std())
    _put(blocks, form.scale, scale)
    if form.minimum is not None:
        _put(blocks, form.minimum, scale * minimum)
    return blocks


def blocks_of(form: Format, numbers: Floats) -> Bytes:
    """Return the blocks that approximate `numbers` [rows, columns], uint8 [rows, bytes], with one step for each block.

    The format's codes must be whole numbers.
    """
    rows = numbers.reshape(-1, form.numbers)
    largest = np.abs(rows).max(axis=1)
    if form.minimum is None:
        lowest, highest = (-127, 127) if form.is_signed else (-form.zero, form.most - form.zero)
        steps, offsets = largest / highest, np.zeros_like(largest)
    else:
        lowest, highest = 0, form.most
        steps, offsets = 2 * largest / highest, largest
    codes = np.rint((rows + offsets[:, None]) / steps[:, None]).clip(lowest, highest).astype(np.int32)
    ones = np.ones((len(rows), len(form.groups)), np.int32)
    blocks = Blocks(codes + form.zero, steps.astype(np.float16), offsets.astype(np.float16), ones, ones)
    return encode(form, blocks).reshape(len(numbers), -1)


def _put_scales(form: Format, blocks: Bytes, spread: float) -> None:
    """Write the power of two that comes nearest as the scale of every block."""
    blocks[:, form.scale.byte] = 127
    size = float(form.decode(blocks[:_SAMPLE]).std())
    blocks[:, form.scale.byte] = 127 + round(np.log2(spread / size))


def _put(blocks: Bytes, scalar: Scalar, value: float) -> None:
    """Write one fp16 number into every block."""
    assert scalar.kind == "F16" and not scalar.fields, scalar
    half: npt.NDArray[Any] = np.array([value / scalar.factor], "<f2")
    blocks[:, scalar.byte : scalar.byte + 2] = half.view(np.uint8)
