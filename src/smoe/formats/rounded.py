"""ggml's first formats: blocks of 32 elements, each with a scale of its own and possibly a minimum."""

from __future__ import annotations

from smoe.formats.base import Bits, Field, Format, Group, Run, Scalar


def _halves(at: int, *more: Bits) -> tuple[Group, ...]:
    """Return one group of 32 four-bit codes that are stored in 16 bytes from `at` on. The lower halves of the bytes
    hold the first 16 elements, the upper halves the other 16. `more`: single bits that extend the codes."""
    upper = [Bits(bits.byte + 2, bits.left) for bits in more]
    return (Group((Run(0, 16, (Field(at, 0, 15), *more)), Run(16, 16, (Field(at, 4, 15), *upper)))),)


Q8_0 = Format("Q8_0", 32, 34, Scalar(0), (Group((Run(0, 32, (Field(2),)),)),), is_signed=True)
Q4_0 = Format("Q4_0", 32, 18, Scalar(0), _halves(2), zero=8)
Q4_1 = Format("Q4_1", 32, 20, Scalar(0), _halves(4), minimum=Scalar(2, factor=-1))
Q5_0 = Format("Q5_0", 32, 22, Scalar(0), _halves(6, Bits(2, 4)), zero=16)
Q5_1 = Format("Q5_1", 32, 24, Scalar(0), _halves(8, Bits(4, 4)), minimum=Scalar(2, factor=-1))
