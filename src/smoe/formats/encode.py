"""Encodes codes and scales to the bytes of blocks: the inverse of `Format.decode`, from the same declaration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from smoe.formats.base import Bits, Bytes, Field, Format, Points, Scalar

Integers = npt.NDArray[np.integer[Any]]


class Blocks(NamedTuple):
    """The codes and scales of N quantized blocks that are to be encoded as bytes."""

    codes: Integers
    """The codes [N, numbers], to which the format's `zero` has been added."""
    scale: npt.NDArray[np.float16]
    """The scales [N]."""
    minimum: npt.NDArray[np.float16] | None = None
    """The minimums [N], in the form in which the file stores `Format.minimum`."""
    group_scales: Integers | None = None
    """The groups' scale codes [N, groups]."""
    group_minimums: Integers | None = None
    """The groups' minimum codes [N, groups]."""


def encode(form: Format, blocks: Blocks) -> Bytes:
    """Return the bytes of blocks as uint8 [N, nbytes]. The format must have fp16 scales, and its codes must be their
    own values."""
    assert form.scale.kind == "F16" and form.table is None and form.grid is None, form.name
    out = np.zeros((len(blocks.codes), form.nbytes), np.uint8)
    _put_scalar(out, form.scale, blocks.scale)
    if form.minimum is not None:
        assert blocks.minimum is not None, form.name
        _put_scalar(out, form.minimum, blocks.minimum)
    codes = blocks.codes.astype(np.uint8)
    for n, group in enumerate(form.groups):
        for run in group.runs:
            for i in range(run.numbers):
                _put(out, run.fields, i, codes[:, run.first + i * run.step])
        if group.scale:
            assert blocks.group_scales is not None, form.name
            _put(out, group.scale, 0, (blocks.group_scales[:, n] + form.scale_zero).astype(np.uint8))
        if group.minimum:
            assert blocks.group_minimums is not None, form.name
            _put(out, group.minimum, 0, blocks.group_minimums[:, n].astype(np.uint8))
    return out


def _put(out: Bytes, fields: Sequence[Field | Bits | Points], i: int, codes: Bytes) -> None:
    for field in fields:
        assert not isinstance(field, Points)
        if isinstance(field, Bits):
            out[:, field.byte + i // 8] |= (codes >> field.left & 1) << i % 8
        else:
            out[:, field.byte + i] |= (codes >> field.left & field.mask) << field.shift


def _put_scalar(out: Bytes, scalar: Scalar, values: npt.NDArray[np.float16]) -> None:
    out[:, scalar.byte : scalar.byte + 2] = values.astype("<f2").reshape(-1, 1).view(np.uint8)
