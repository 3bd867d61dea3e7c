"""MXFP4 (OCP Microscaling, version 1.0): 32 four-bit floats and a power of two, in ggml's and OpenAI's layouts.

In ggml's 16 bytes of codes, byte j has elements j and 16 + j; in OpenAI's, 2j and 2j + 1; the lower half is first.
"""

from __future__ import annotations

from smoe.formats.base import Field, Format, Group, Run, Scalar

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_SIZES, *(-number for number in _SIZES))
"""The values of 4-bit codes."""
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
"""OpenAI's layout. Its files store codes and scales in separate tensors, which are joined to blocks in the slot."""
