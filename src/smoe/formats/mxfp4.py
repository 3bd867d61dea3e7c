"""MXFP4 (OCP Microscaling, version 1.0): 32 floats of four bits and a power of two, in the layouts of ggml and of
OpenAI.

A block has 16 bytes of codes. In ggml's layout, byte j has elements j and 16 + j; in OpenAI's it has elements 2j and 2j
+ 1. The lower half of a byte is the first element.
"""

from __future__ import annotations

from smoe.formats.base import Field, Format, Group, Run, Scalar

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_SIZES, *(-number for number in _SIZES))
"""The values of the 16 codes."""
MXFP4 = Format(
    "MXFP4",
    32,
    17,
    Scalar(0, "E8M0"),
    (Group((Run(0, 16, (Field(1, 0, 15),)), Run(16, 16, (Field(1, 4, 15),)))),),
    table=E2M1,
)
MXFP4_PAIRS = Format(
    "MXFP4_PAIRS",
    32,
    17,
    Scalar(0, "E8M0"),
    (Group((Run(0, 16, (Field(1, 0, 15),), step=2), Run(1, 16, (Field(1, 4, 15),), step=2))),),
    table=E2M1,
)
"""OpenAI's layout. Its files have codes and scales in separate tensors, which are joined to blocks in the slot."""
