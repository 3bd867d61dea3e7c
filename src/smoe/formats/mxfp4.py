"""MXFP4 (OCP Microscaling, version 1.0) as ggml lays it out: 32 numbers of four bits and one power of two."""

from __future__ import annotations

from smoe.formats.base import Field, Format, Group, Run, Scalar

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4 = Format(
    "MXFP4",
    32,
    17,
    Scalar(0, is_exponent=True),
    (Group((Run(0, 16, (Field(1, 0, 15),)), Run(16, 16, (Field(1, 4, 15),)))),),
    table=(*_E2M1, *(-number for number in _E2M1)),
)
