"""ggml's i-quants: a code is looked up.

    IQ4_NL     scale | 16 bytes: numbers j and 16 + j in byte j
    IQ4_XS     scale | two high bits of 8 groups' scales | their four low bits | 16 bytes for each group

Those of four bits have a table of 16 numbers.
"""

from __future__ import annotations

from smoe.formats.base import Field, Format, Group, Run, Scalar

_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What codes of four bits stand for: closer to each other where weights are frequent."""


def _halves(first: int, byte: int) -> tuple[Run, Run]:
    """32 codes of four bits: the lower halves of 16 bytes are the first 16 numbers, the upper ones the others."""
    return Run(first, 16, (Field(byte, 0, 15),)), Run(first + 16, 16, (Field(byte, 4, 15),))


def _iq4_xs() -> tuple[Group, ...]:
    groups = []
    for n in range(8):
        scale = (Field(4 + n // 2, 4 * (n % 2), 15), Field(2 + n // 4, 2 * (n % 4), 3, 4))
        groups.append(Group(_halves(32 * n, 8 + 16 * n), scale))
    return tuple(groups)


IQ4_NL = Format("IQ4_NL", 32, 18, Scalar(0), (Group(_halves(0, 2)),), table=_UNEVEN)
IQ4_XS = Format("IQ4_XS", 256, 136, Scalar(0), _iq4_xs(), table=_UNEVEN, scale_zero=32)
