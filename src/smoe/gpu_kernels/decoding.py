"""Generates Triton text that dequantizes a format, from the format's declaration (`formats/base.py`).

The text dequantizes tiles [N rows, B blocks per row, R elements]. R is the length of the format's runs, and the runs of
a block are handled one after the other. Scalars of a block, such as its scale, are loaded as [N, B], once for all runs.
A byte that two runs share is loaded once. Variables of the text:

    head    pointers [N, B] to the blocks          here    bool [N, B] (or 1): which of the blocks exist
    lane    0 ... R - 1                            at      pointers [N, B, R] to R bytes from each head on
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from smoe.formats.base import Bits, Field, Format, Group, Points, Scalar

_HALF_BIAS = 256.0
"""The factor between the value of an E4M3 number and that of the float16 number that has the same upper bits."""


def fits(form: Format) -> bool:
    """Return whether GPU kernels can dequantize a format: it must be quantized, and its elements must not be points of
    a grid (a codebook of short vectors)."""
    return form.grid is None and not form.reals


def run_length(form: Format) -> int:
    """Return the number of elements in a run (elements whose codes are in neighbouring bytes). All runs of a format
    have the same length."""
    (length,) = {run.numbers for group in form.groups for run in group.runs}
    return length


def alignment_of(address_alignment: int, row_bytes: int, form: Format) -> int:
    """Return the largest power of two, at most 16, that divides the addresses of all blocks of a matrix.
    `address_alignment` divides the matrix's own address."""
    alignment = 16
    while alignment > 1 and any(each % alignment for each in (address_alignment, row_bytes, form.nbytes)):
        alignment //= 2
    return alignment


class Decoding:
    """Makes the Triton statements that dequantize one tile of a quantized matrix, run by run."""

    def __init__(self, form: Format, alignment: int, mask: str, tile_mask: str) -> None:
        """`alignment`: the alignment of blocks in bytes. `mask` and `tile_mask`: the last arguments of loads of [N, B]
        and of [N, B, R]."""
        self._form = form
        self._alignment = alignment
        self._mask, self._tile_mask = mask, tile_mask
        self._known: dict[str, str] = {}
        self.lines: list[str] = []

    def runs(self) -> Iterator[tuple[str, int, int]]:
        """Yield for each run of a block: the name of the variable that holds the run's elements, float32 [N, B, R]; the
        index of the run's first element; and the distance between its elements.

        When a run is yielded, `lines` contain the statements that compute the variable.
        """
        form = self._form
        scale = self._scalar(form.scale)
        minimum = None if form.minimum is None else self._scalar(form.minimum)
        for group in form.groups:
            gain = self._gain(scale, group)
            offset = self._offset(minimum, group)
            for run in group.runs:
                value = self._value(self._tile_code(run.fields))
                number = f"{value} * {gain}[:, :, None]"
                if offset is not None:
                    number += f" - {offset}[:, :, None]"
                yield self._named(number), run.first, run.step

    def _named(self, expression: str) -> str:
        """Return the name of the variable that holds the value of an expression. If no variable holds it, add a
        statement that computes one."""
        if expression not in self._known:
            name = self._known[expression] = f"v{len(self._known)}"
            self.lines.append(f"{name} = {expression}")
        return self._known[expression]

    def _gain(self, scale: str, group: Group) -> str:
        if not group.scale:
            return scale
        code = self._named(self._code(group.scale))
        if self._form.has_float8_scales:
            return self._named(f"{scale} * {self._float8(code)}")
        if self._form.has_signed_scales:
            code = self._named(f"({code} ^ 128) - 128")
        elif self._form.scale_zero:
            code = self._named(f"{code} - {self._form.scale_zero}")
        return self._named(f"{scale} * {code}.to(tl.float32)")

    def _offset(self, minimum: str | None, group: Group) -> str | None:
        if minimum is None or not group.minimum:
            return minimum
        return self._named(f"{minimum} * {self._named(self._code(group.minimum))}.to(tl.float32)")

    def _code(self, fields: Sequence[Field | Bits]) -> str:
        """Return a Triton expression for a code that each group has once, such as its scale code: int32 [N, B]."""
        return " + ".join(self._bits(self._byte(field), field) for field in fields if isinstance(field, Field))

    def _tile_code(self, fields: Sequence[Field | Bits | Points]) -> str:
        """Return an expression for the codes of a run: int32 [N, B, R]."""
        parts = []
        for field in fields:
            assert not isinstance(field, Points)
            if isinstance(field, Bits):
                byte = self._named(
                    f"tl.load(head[:, :, None] + ({field.byte} + lane // 8){self._tile_mask}).to(tl.int32)"
                )
                parts.append(f"(({byte} >> lane % 8 & 1) << {field.left})")
            else:
                byte = self._named(f"tl.load(at + {field.byte}{self._tile_mask}).to(tl.int32)")
                parts.append(self._bits(byte, field))
        return self._named(" + ".join(parts))

    def _byte(self, field: Field) -> str:
        return self._named(f"tl.load(head + {field.byte}{self._mask}).to(tl.int32)")

    @staticmethod
    def _bits(byte: str, field: Field) -> str:
        bits = f"({byte} >> {field.shift})" if field.shift else byte
        if field.mask < 255 >> field.shift:
            bits = f"({bits} & {field.mask})"
        return f"({bits} << {field.left})" if field.left else bits

    def _value(self, code: str) -> str:
        form = self._form
        if form.table is not None:
            return self._named(_looked_up(code, form.table))
        if form.is_float8:
            return self._float8(code)
        if form.is_signed:
            code = self._named(f"({code} ^ 128) - 128")
        elif form.zero:
            code = self._named(f"{code} - {form.zero}")
        return self._named(f"{code}.to(tl.float32)")

    def _float8(self, code: str) -> str:
        half = f"(({code} & 128) << 8 | ({code} & 127) << 7).to(tl.uint16)"
        return self._named(f"{half}.to(tl.float16, bitcast=True).to(tl.float32) * {_HALF_BIAS!r}")

    def _scalar(self, scalar: Scalar) -> str:
        """Return an expression for a scalar of each block: float32 [N, B]."""
        if scalar.kind == "E8M0":
            exponent = self._byte(Field(scalar.byte))
            return self._named(f"tl.where({exponent} == 0, 1 << 22, {exponent} << 23).to(tl.float32, bitcast=True)")
        kind = "tl.float16" if scalar.kind == "F16" else "tl.float32"
        if self._alignment % scalar.nbytes == 0 and scalar.byte % scalar.nbytes == 0:
            number = f"tl.load((head + {scalar.byte}).to(tl.pointer_type({kind})){self._mask})"
        else:
            bits = " | ".join(f"({self._byte(Field(scalar.byte + n))} << {8 * n})" for n in range(scalar.nbytes))
            bits = f"({bits}).to(tl.uint16)" if scalar.kind == "F16" else f"({bits})"
            number = f"{bits}.to({kind}, bitcast=True)"
        number = self._named(f"{number}.to(tl.float32)")
        return number if scalar.factor == 1 else self._named(f"{number} * {float(scalar.factor)!r}")


def _looked_up(code: str, table: Sequence[float]) -> str:
    """Return a Triton expression that looks up a code in a table of 16 numbers. The expression holds the table in one
    or four 32-bit words.

    One word is enough if the table consists of eight halves of small integers and their negatives, as in E2M1.
    Otherwise the numbers must be 8-bit integers.
    """
    assert len(table) == 16, table
    doubled = [2 * number for number in table[:8]]
    if all(number in range(16) for number in doubled) and all(table[8 + n] == -table[n] for n in range(8)):
        word = _signed(sum(int(number) << 4 * n for n, number in enumerate(doubled)))
        size = f"((({word} >> 4 * ({code} & 7)) & 15).to(tl.float32) * 0.5)"
        return f"tl.where({code} > 7, -{size}, {size})"
    assert all(number in range(-128, 128) for number in table), table
    words = [_signed(sum((int(table[n + i]) & 255) << 8 * i for i in range(4))) for n in range(0, 16, 4)]
    first, second = (f"tl.where(({code} & 4) == 0, {words[n]}, {words[n + 1]})" for n in (0, 2))
    picked = f"tl.where({code} < 8, {first}, {second})"
    return f"(({picked} << (3 - ({code} & 3)) * 8) >> 24).to(tl.float32)"


def _signed(word: int) -> int:
    """Return a 32-bit word as the signed number with the same bits, as Triton reads it."""
    return word - (word >> 31 << 32)
