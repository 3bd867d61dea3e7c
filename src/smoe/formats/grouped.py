"""The formats of our own for `smoe pack`. A block has 64 elements, so that rows of narrow experts consist of whole
blocks.

The codes are laid out so that kernels need few operations to combine their bits:

    INT4   scale | minimum | 32 bytes                            4.5 bits per element: elements i and i + 32 in one byte
    INT3   scale | minimum | 16 bytes | 8 bytes                  3.5 bits: the two lower bits of elements i, i + 16,
                                                                 i + 32, i + 48 in one byte, then the highest bits of 8
                                                                 neighbours in one byte
    INT2   scale | minimum | 4 x (scale, minimum) | 16 bytes     3 bits: elements i, i + 16, i + 32, i + 48 in one byte
"""

from __future__ import annotations

from smoe.formats.base import Bits, Field, Format, Group, Run, Scalar


def _quarter(n: int) -> Group:
    """Return the declaration of group number `n` of an INT2 block: 16 elements of two bits, with a 4-bit scale and a
    4-bit minimum."""
    return Group((Run(16 * n, 16, (Field(8, 2 * n, 3),)),), (Field(4 + n, 0, 15),), (Field(4 + n, 4, 15),))


INT4 = Format(
    "INT4",
    64,
    36,
    Scalar(0),
    (Group((Run(0, 32, (Field(4, 0, 15),)), Run(32, 32, (Field(4, 4, 15),)))),),
    minimum=Scalar(2, factor=-1),
)
INT3 = Format(
    "INT3",
    64,
    28,
    Scalar(0),
    (Group(tuple(Run(16 * n, 16, (Field(4, 2 * n, 3), Bits(20 + 2 * n, 2))) for n in range(4))),),
    minimum=Scalar(2, factor=-1),
)
INT2 = Format("INT2", 64, 24, Scalar(0), tuple(map(_quarter, range(4))), minimum=Scalar(2))
