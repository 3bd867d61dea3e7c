"""Formats of releases on the hub whose codes, scales and zero points lie in tensors of their own: blocks as they are
put together in a slot (`memory/arrangement.py`).

    FP8           scale | 128 numbers of eight bits                           8.25 bits
    W4_G, W8_G    scale | zero point | codes of G numbers                     4.3 and 8.3 bits with 128, 5.25 with 32

A scale is a float32, whatever the file has it in. Of codes of four bits a byte has two neighbours, the lower half
first: as words of 32 bits with eight codes are in compressed-tensors and GPTQ.
"""

from __future__ import annotations

from smoe.formats.base import Field, Format, Group, Run, Scalar

SCALE_BYTES = 4
"""Of a block, which begins with it; a zero point follows where there is one."""


def _pairs(numbers: int, byte: int) -> tuple[Run, ...]:
    """Two codes a byte; 32 numbers at a time, so that registers find theirs in two neighbours."""
    places = [(32 * n + odd, Field(byte + 16 * n, 4 * odd, 15)) for n in range(numbers // 32) for odd in (0, 1)]
    return tuple(Run(first, 16, (field,), step=2) for first, field in places)


def _weights(bits: int, numbers: int) -> Format:
    byte = SCALE_BYTES + 1
    runs = _pairs(numbers, byte) if bits == 4 else (Run(0, numbers, (Field(byte),)),)
    return Format(
        f"W{bits}_{numbers}",
        numbers,
        byte + numbers * bits // 8,
        Scalar(0, "F32"),
        (Group(runs, minimum=(Field(SCALE_BYTES),)),),
        minimum=Scalar(0, "F32"),
    )


FP8 = Format(
    "FP8", 128, SCALE_BYTES + 128, Scalar(0, "F32"), (Group((Run(0, 128, (Field(SCALE_BYTES),)),)),), is_float8=True
)
WEIGHTS = {(bits, numbers): _weights(bits, numbers) for bits in (4, 8) for numbers in (32, 64, 128)}
"""By bits of a code, and numbers that share a scale."""
