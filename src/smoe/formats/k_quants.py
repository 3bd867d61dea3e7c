"""ggml's K-quants: blocks of 256 elements, in groups of 16 or 32 elements whose scales are quantized too."""

from __future__ import annotations

from smoe.formats.base import Field, Format, Group, Run, Scalar


def _six_bits(at: int, group: int) -> tuple[tuple[Field, ...], tuple[Field, ...]]:
    """Return the fields of the scale and of the minimum of one of 8 groups. Each has six bits, in 12 bytes from `at`
    on."""
    if group < 4:
        return (Field(at + group, 0, 63),), (Field(at + group + 4, 0, 63),)
    high_scale, high_minimum = Field(at + group - 4, 6, 3, 4), Field(at + group, 6, 3, 4)
    return (Field(at + group + 4, 0, 15), high_scale), (Field(at + group + 4, 4, 15), high_minimum)


def _place(group: int) -> tuple[int, int, int]:
    """Return the position of one of 16 groups in its block: the half of the block, the quarter of that half (32
    elements), and the group's first element in that quarter."""
    return group // 8, group % 8 // 2, 16 * (group % 2)


def _q4_k() -> tuple[Group, ...]:
    groups = []
    for n in range(8):
        scale, minimum = _six_bits(4, n)
        codes = Field(16 + 32 * (n // 2), 4 * (n % 2), 15)
        groups.append(Group((Run(32 * n, 32, (codes,)),), scale, minimum))
    return tuple(groups)


def _q5_k() -> tuple[Group, ...]:
    groups = []
    for n in range(8):
        scale, minimum = _six_bits(4, n)
        codes = (Field(48 + 32 * (n // 2), 4 * (n % 2), 15), Field(16, n, 1, 4))
        groups.append(Group((Run(32 * n, 32, codes),), scale, minimum))
    return tuple(groups)


def _q6_k() -> tuple[Group, ...]:
    groups = []
    for n in range(16):
        half, quarter, offset = _place(n)
        low = Field(64 * half + 32 * (quarter % 2) + offset, 4 * (quarter // 2), 15)
        high = Field(128 + 32 * half + offset, 2 * quarter, 3, 4)
        groups.append(Group((Run(16 * n, 16, (low, high)),), (Field(192 + n),)))
    return tuple(groups)


def _q2_k() -> tuple[Group, ...]:
    groups = []
    for n in range(16):
        half, quarter, offset = _place(n)
        codes = Field(16 + 32 * half + offset, 2 * quarter, 3)
        groups.append(Group((Run(16 * n, 16, (codes,)),), (Field(n, 0, 15),), (Field(n, 4, 15),)))
    return tuple(groups)


def _q3_k() -> tuple[Group, ...]:
    groups = []
    for n in range(16):
        half, quarter, offset = _place(n)
        low = Field(32 + 32 * half + offset, 2 * quarter, 3)
        high = Field(offset, 4 * half + quarter, 1, 2)
        scale = (Field(96 + n % 8, 4 * (n // 8), 15), Field(104 + n % 4, 2 * (n // 4), 3, 4))
        groups.append(Group((Run(16 * n, 16, (low, high)),), scale))
    return tuple(groups)


Q2_K = Format("Q2_K", 256, 84, Scalar(80), _q2_k(), minimum=Scalar(82))
Q3_K = Format("Q3_K", 256, 110, Scalar(108), _q3_k(), zero=4, scale_zero=32)
Q4_K = Format("Q4_K", 256, 144, Scalar(0), _q4_k(), minimum=Scalar(2))
Q5_K = Format("Q5_K", 256, 176, Scalar(0), _q5_k(), minimum=Scalar(2))
Q6_K = Format("Q6_K", 256, 210, Scalar(208), _q6_k(), zero=32, has_signed_scales=True)
