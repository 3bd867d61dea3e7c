"""ggml's ternary format TQ2_0, whose elements are -1, 0 or 1 times the block's scale.

64 bytes: element 128 h + 32 n + i in bits 2 n and 2 n + 1 of byte 32 h + i | scale
"""

from __future__ import annotations

from smoe.formats.base import Field, Format, Group, Run, Scalar


def _tq2_0() -> tuple[Group, ...]:
    """Return the groups of a TQ2_0 block, 32 elements each. They have no scales of their own, but activations in 8 bits
    are rounded per group."""
    places = [(half, n) for half in range(2) for n in range(4)]
    return tuple(Group((Run(128 * half + 32 * n, 32, (Field(32 * half, 2 * n, 3),)),)) for half, n in places)


TQ2_0 = Format("TQ2_0", 256, 66, Scalar(64), _tq2_0(), zero=1)
