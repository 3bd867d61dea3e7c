"""ggml's i-quants, in which a code is looked up: in a table of 16 numbers, or in a grid of points (`grids.py`).

Each line shows the contents of a block in the file:

    IQ4_NL   scale | 16 bytes: elements j and 16 + j in byte j
    IQ4_XS   scale | the two high bits of 8 groups' scales | their four low bits | 16 bytes for each group
    IQ3_XXS  scale | 64 indices of four elements each | 8 x (4 x 7 signs, scale of a group)
    IQ3_S    scale | 64 indices | their ninth bits | signs | scales of 8 groups
    IQ2_XXS  scale | 8 x (four indices of eight elements each, 4 x 7 signs, scale of a group)
    IQ2_XS   scale | 32 x (index of nine bits, 7 signs) | scales of 16 groups
    IQ2_S    scale | 32 indices | signs | two more bits of every index | scales of 16 groups
    IQ1_S    scale | 32 indices | 8 x (three more bits of four indices, scale of a group, shift)
    IQ1_M    32 indices | 32 x (three more bits of an index, shift) | 4 x (scales of 4 groups, a quarter of the scale)

Blocks have 256 elements, those of IQ4_NL 32. In the formats with a grid the scale of a group is an odd number, 2 * code
+ 1. The shift of IQ1, an eighth of a level up or down, is treated here as the highest bit of an index.
"""

from __future__ import annotations

from collections.abc import Callable

from smoe.formats.base import Field, Format, Group, Points, Run, Scalar
from smoe.formats.grids import Grid

Fields = tuple[Field, ...]
_NUMBERS = 256
"""The number of elements per block of points."""
_RUN = 16
_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the 16 codes of four bits. They are denser where weights are frequent."""
_IN_TWO_BITS = (8, 25, 43)
_IN_THREE_BITS = (4, 12, 20, 28, 36, 44, 52, 62)


def _halves(first: int, byte: int) -> tuple[Run, Run]:
    """Return the two runs of 32 four-bit codes that are stored in 16 bytes from `byte` on. The lower halves of the
    bytes hold the first 16 elements, the upper halves the other 16."""
    return Run(first, 16, (Field(byte, 0, 15),)), Run(first + 16, 16, (Field(byte, 4, 15),))


def _iq4_xs() -> tuple[Group, ...]:
    groups = []
    for n in range(8):
        scale = (Field(4 + n // 2, 4 * (n % 2), 15), Field(2 + n // 4, 2 * (n % 4), 3, 4))
        groups.append(Group(_halves(32 * n, 8 + 16 * n), scale))
    return tuple(groups)


def _bits(byte: int, first: int, count: int, left: int = 0) -> Fields:
    """Return the fields for `count` bits of a little-endian word that begins at `byte`, from its bit `first` on."""
    fields = []
    while count:
        at, shift = divmod(first, 8)
        some = min(count, 8 - shift)
        fields.append(Field(byte + at, shift, (1 << some) - 1, left))
        first, left, count = first + some, left + some, count - some
    return tuple(fields)


def _groups(
    grid: Grid,
    size: int,
    index: Callable[[int], Fields],
    signs: Callable[[int], Fields] | None,
    scale: Callable[[int], Fields],
    has_even_signs: bool = False,
) -> tuple[Group, ...]:
    """Return the declarations of a block's groups of `size` elements, each a run of grid points. The arguments are
    functions that return bit fields: `index` for the index of a point, `signs` for the signs of eight elements, `scale`
    for the scale of a group."""
    points = _RUN // grid.width

    def run(n: int) -> Run:
        indices = tuple(index(points * n + i) for i in range(points))
        both = () if signs is None else (signs(2 * n), signs(2 * n + 1))
        return Run(_RUN * n, _RUN, (Points(grid, indices, both, has_even_signs),))

    runs = size // _RUN
    return tuple(Group(tuple(run(runs * g + n) for n in range(runs)), scale(g)) for g in range(_NUMBERS // size))


def _of_points(name: str, nbytes: int, groups: tuple[Group, ...], scale: Scalar) -> Format:
    """Return a format of grid points whose groups have odd scales, 2 * code + 1. The scale codes in `groups` are
    already doubled, so 1 is added to them."""
    return Format(name, _NUMBERS, nbytes, scale, groups, scale_zero=-1)


IQ4_NL = Format("IQ4_NL", 32, 18, Scalar(0), (Group(_halves(0, 2)),), table=_UNEVEN)
IQ4_XS = Format("IQ4_XS", 256, 136, Scalar(0), _iq4_xs(), table=_UNEVEN, scale_zero=32)
IQ3_XXS = _of_points(
    "IQ3_XXS",
    98,
    _groups(
        Grid("IQ3_XXS", 4, _IN_THREE_BITS),
        32,
        lambda point: (Field(2 + point),),
        lambda eight: _bits(66 + eight // 4 * 4, 7 * (eight % 4), 7),
        lambda group: _bits(66 + 4 * group, 28, 4, 1),
        has_even_signs=True,
    ),
    Scalar(0, factor=1 / 4),
)
IQ3_S = _of_points(
    "IQ3_S",
    110,
    _groups(
        Grid("IQ3_S", 4, (1, 3, 5, 7, 9, 11, 13, 15)),
        32,
        lambda point: (Field(2 + point), *_bits(66, point, 1, 8)),
        lambda eight: (Field(74 + eight),),
        lambda group: _bits(106, 4 * group, 4, 1),
    ),
    Scalar(0),
)
IQ2_XXS = _of_points(
    "IQ2_XXS",
    66,
    _groups(
        Grid("IQ2_XXS", 8, _IN_TWO_BITS),
        32,
        lambda point: (Field(2 + point // 4 * 8 + point % 4),),
        lambda eight: _bits(6 + eight // 4 * 8, 7 * (eight % 4), 7),
        lambda group: _bits(6 + 8 * group, 28, 4, 1),
        has_even_signs=True,
    ),
    Scalar(0, factor=1 / 8),
)
IQ2_XS = _of_points(
    "IQ2_XS",
    74,
    _groups(
        Grid("IQ2_XS", 8, _IN_TWO_BITS),
        16,
        lambda point: _bits(2 + 2 * point, 0, 9),
        lambda eight: _bits(2 + 2 * eight, 9, 7),
        lambda group: _bits(66, 4 * group, 4, 1),
        has_even_signs=True,
    ),
    Scalar(0, factor=1 / 8),
)
IQ2_S = _of_points(
    "IQ2_S",
    82,
    _groups(
        Grid("IQ2_S", 8, _IN_TWO_BITS),
        16,
        lambda point: (Field(2 + point), *_bits(66, 2 * point, 2, 8)),
        lambda eight: (Field(34 + eight),),
        lambda group: _bits(74, 4 * group, 4, 1),
    ),
    Scalar(0, factor=1 / 8),
)
_TERNARY = Grid("IQ1_S", 8, (-8, 0, 8), shifts=(1, -1))
IQ1_S = _of_points(
    "IQ1_S",
    50,
    _groups(
        _TERNARY,
        32,
        lambda point: (
            Field(2 + point),
            *_bits(34 + point // 4 * 2, 3 * (point % 4), 3, 8),
            *_bits(34 + point // 4 * 2, 15, 1, 11),
        ),
        None,
        lambda group: _bits(34 + 2 * group, 12, 3, 1),
    ),
    Scalar(0, factor=1 / 8),
)
IQ1_M = _of_points(
    "IQ1_M",
    56,
    _groups(
        _TERNARY,
        16,
        lambda point: (Field(point), *_bits(32, 4 * point, 4, 8)),
        None,
        lambda group: _bits(48 + group // 4 * 2, 3 * (group % 4), 3, 1),
    ),
    Scalar(48, factor=1 / 8, fields=tuple(Field(49 + 2 * n, 4, 15, 4 * n) for n in range(4))),
)
