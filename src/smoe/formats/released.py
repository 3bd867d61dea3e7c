"""Formats for checkpoints that have codes, scales and zero points in separate tensors. In a slot, these tensors are
joined to the blocks that the formats describe (`memory/arrangement.py`).

G and B are numbers of elements:

    FP8         scale | 128 elements of eight bits                        8.25 bits per element
    W4_G, W8_G  scale | zero point | codes of G elements                  4.3 and 8.3 bits for 128 elements, 5.25 for 32
    NVFP4_B     scale | scales of B / 16 groups | codes of B elements     4.75 bits for 128 elements, 5 for 64

A scale is a float32, whatever its type in the file; the scales of NVFP4's groups are 8-bit floats, E4M3. A byte has the
4-bit codes of two neighbours, the lower half first, like the 32-bit words of compressed-tensors and GPTQ. In NVFP4 a
byte has one code of either of two groups, unlike in files, so that vector registers find a group in neighbouring bytes.
"""

from __future__ import annotations

from smoe.formats.base import Field, Format, Group, Run, Scalar
from smoe.formats.mxfp4 import E2M1

SCALE_BYTES = 4
"""The bytes of a block's scale, which is at the block's beginning. A zero point or the scales of groups follow."""
NVFP4_GROUP = 16
"""The number of elements per 8-bit scale."""


def _pairs(numbers: int, byte: int) -> tuple[Run, ...]:
    """Return runs of elements with two neighbouring codes in a byte. Each run has 16 codes in 16 neighbouring bytes,
    which suits vector registers."""
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


def _nvfp4(numbers: int) -> Format:
    scales = numbers // NVFP4_GROUP
    codes = SCALE_BYTES + scales
    places = [(n, Field(codes + n // 2 * 16, n % 2 * 4, 15)) for n in range(scales)]
    runs = [(Run(NVFP4_GROUP * n, NVFP4_GROUP, (place,)),) for n, place in places]
    groups = tuple(Group(run, (Field(SCALE_BYTES + n),)) for n, run in enumerate(runs))
    nbytes, scale = codes + numbers // 2, Scalar(0, "F32")
    return Format(f"NVFP4_{numbers}", numbers, nbytes, scale, groups, table=E2M1, has_float8_scales=True)


WEIGHTS = {(bits, numbers): _weights(bits, numbers) for bits in (4, 8) for numbers in (32, 64, 128)}
"""The formats, by (bits per code, elements per scale)."""
NVFP4 = {numbers: _nvfp4(numbers) for numbers in (128, 64)}
"""The formats by the number of elements of a block, the larger first."""
RELEASED: dict[str, Format] = {each.name: each for each in (FP8, *WEIGHTS.values(), *NVFP4.values())}
"""All formats of this module, by name."""
