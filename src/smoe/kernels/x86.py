"""Operations that need special instructions on x86. All other operations are LLVM text for any CPU (`builder.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llvmlite import ir

from smoe.kernels.kinds import BFLOAT, BYTE, FLOAT, HALF_WORD, POINTER, WORD, Value

if TYPE_CHECKING:
    from smoe.kernels.builder import Code


def looked_up_halves(code: Code, table: Sequence[int], codes: Value) -> Value:
    whole = ir.Constant(codes.type, [ir.Constant(HALF_WORD, each) for each in (*table, *table)])
    kind = ir.FunctionType(codes.type, [codes.type] * 2)
    return code.intrinsic("llvm.x86.avx512.permvar.hi.512", kind, [whole, codes])


def looked_up_bytes(code: Code, table: Sequence[int], codes: Value) -> Value:
    whole = code.bytes([*table] * (codes.type.count // len(table)))
    name = "llvm.x86.avx512.pshuf.b.512" if codes.type.count == 64 else "llvm.x86.avx2.pshuf.b"
    return code.intrinsic(name, ir.FunctionType(codes.type, [codes.type] * 2), [whole, codes])


def picked_bytes(code: Code, table: Sequence[int], places: Value) -> Value:
    low, high = (code.bytes(table[n : n + 64]) for n in (0, 64))
    kind = ir.FunctionType(places.type, [places.type] * 3)
    return code.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", kind, [low, places, high])


def looked_up(code: Code, table: Sequence[float], codes: Value) -> Value:
    whole = ir.Constant(ir.VectorType(FLOAT, len(table)), [ir.Constant(FLOAT, each) for each in table])
    if code.isa.lanes == 16:
        kind = ir.FunctionType(whole.type, [whole.type, codes.type])
        return code.intrinsic("llvm.x86.avx512.permvar.sf.512", kind, [whole, codes])
    halves = [ir.Constant(code.registers(FLOAT, 8), whole.constant[n : n + 8]) for n in (0, 8)]
    kind = ir.FunctionType(halves[0].type, [halves[0].type, codes.type])
    low, high = (code.intrinsic("llvm.x86.avx2.permps", kind, [half, codes]) for half in halves)
    upper = code.build.and_(codes, code.words([8] * 8))
    if tuple(table[8:]) == tuple(-number for number in table[:8]):
        bits = code.build.or_(code.build.bitcast(low, codes.type), code.build.shl(upper, code.words([28] * 8)))
        return code.build.bitcast(bits, low.type)
    return code.build.select(code.build.icmp_unsigned("!=", upper, code.words([0] * 8)), high, low)


_GATHERS = {
    (16, 4): "avx512.mask.gather.dpi.512",
    (16, 8): "avx512.mask.gather.dpq.512",
    (8, 4): "avx2.gather.d.d.256",
    (8, 8): "avx2.gather.d.q.256",
}
"""The gather intrinsics by (lanes, bytes per entry). Each fills one register with entries."""


def gathered(code: Code, table: Value, places: Value, width: int) -> Value:
    lanes = places.type.count
    count, kind = lanes * 4 // width, ir.VectorType(ir.IntType(8 * width), lanes * 4 // width)
    flags = ir.VectorType(ir.IntType(1), count)
    every = ir.Constant(flags, [ir.Constant(flags.element, 1)] * count)
    if lanes == 8:
        every = ir.Constant(kind, [ir.Constant(kind.element, -1)] * count)
    scale = ir.Constant(WORD if lanes == 16 else BYTE, width)
    found = []
    for n in range(0, lanes, count):
        some = code.pick(places, range(n, n + count))
        types = [kind, POINTER, some.type, every.type, scale.type]
        given = [ir.Constant(kind, None), table, some, every, scale]
        name = f"llvm.x86.{_GATHERS[lanes, width]}"
        found.append(code.intrinsic(name, ir.FunctionType(kind, types), given))
    return code.joined(found)


def where_set(code: Code, word: Value, numbers: Value, others: Value) -> Value:
    flags = code.build.bitcast(word, ir.VectorType(ir.IntType(1), numbers.type.count))
    return code.build.select(flags, numbers, others)


def dots(code: Code, total: Value, a: Value, b: Value) -> Value:
    halves = ir.VectorType(BFLOAT, a.type.count)
    kind = ir.FunctionType(total.type, [total.type, halves, halves])
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * total.type.count}"
    return code.intrinsic(name, kind, [total, code.build.bitcast(a, halves), code.build.bitcast(b, halves)])


def paired(code: Code, even: Value, odd: Value) -> Value:
    lanes = even.type.count
    halves = ir.VectorType(BFLOAT, 2 * lanes)
    name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * lanes}"
    joined = code.intrinsic(name, ir.FunctionType(halves, [even.type] * 2), [odd, even])
    in_turns = [n + lanes * half for n in range(lanes) for half in range(2)]
    return code.pick(code.build.bitcast(joined, code.registers(HALF_WORD, 2 * lanes)), in_turns)


def byte_dots(code: Code, total: Value, codes: Value, x: Value, is_signed: bool) -> Value:
    build, lanes = code.build, total.type.count
    if code.isa.has_int8_dots:
        assert not is_signed
        kind = ir.FunctionType(total.type, [total.type] * 3)
        words = [build.bitcast(each, total.type) for each in (codes, x)]
        return code.intrinsic(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", kind, [total, *words])
    if is_signed:
        codes, x = _without_sign(code, codes, x)
    return build.add(total, _sums_of_pairs(code, _pairs_of(code, codes, x)))


class DotSum:
    """An accumulator of dot products of four bytes. On CPUs without an instruction for them, pairs of products are
    added in 16 bits, as many as always fit."""

    def __init__(self, code: Code, most: int, is_signed: bool) -> None:
        self._code = code
        self._is_signed = is_signed
        self._fit = 1 if is_signed else max(1, 32767 // (2 * 127 * most))
        self._halves: Value = None
        self._count = 0
        self._total: Value = None

    def add(self, codes: Value, x: Value) -> None:
        """Add a dot product of four bytes of codes and four bytes of x to the sum in every lane."""
        code = self._code
        if code.isa.has_int8_dots:
            before = ir.Constant(code.registers(WORD), None) if self._total is None else self._total
            self._total = byte_dots(code, before, codes, x, self._is_signed)
            return
        if self._is_signed:
            codes, x = _without_sign(code, codes, x)
        twos = _pairs_of(code, codes, x)
        self._halves = twos if self._halves is None else code.build.add(self._halves, twos)
        self._count += 1
        if self._count == self._fit:
            self._widen()

    def pin(self) -> None:
        """Make LLVM finish the sum of the products added so far before it begins the instructions that follow
        (`Code.pinned`)."""
        if self._halves is not None:
            self._halves = self._code.pinned(self._halves)
        elif self._total is not None:
            self._total = self._code.pinned(self._total)

    def total(self) -> Value:
        """Return the sums of all added dot products, int32 [n]."""
        self._widen()
        return self._total

    def _widen(self) -> None:
        """Add the sums that are held in 16 bits to the total in 32 bits, and reset them."""
        if self._halves is not None:
            fours = _sums_of_pairs(self._code, self._halves)
            self._total = fours if self._total is None else self._code.build.add(self._total, fours)
        self._halves, self._count = None, 0


def _pairs_of(code: Code, codes: Value, x: Value) -> Value:
    """Return sums of two products of bytes each, codes times x, as int16 [2n]."""
    pairs = ir.VectorType(HALF_WORD, codes.type.count // 2)
    name = "llvm.x86.avx512.pmaddubs.w.512" if codes.type.count == 64 else "llvm.x86.avx2.pmadd.ub.sw"
    return code.intrinsic(name, ir.FunctionType(pairs, [codes.type] * 2), [codes, x])


def _sums_of_pairs(code: Code, halves: Value) -> Value:
    """Return sums of neighbouring numbers: int32 [n] for int16 [2n]."""
    lanes = halves.type.count // 2
    kind = ir.VectorType(WORD, lanes)
    name = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    return code.intrinsic(name, ir.FunctionType(kind, [halves.type] * 2), [halves, code.halves([1] * 2 * lanes)])


def _without_sign(code: Code, codes: Value, x: Value) -> tuple[Value, Value]:
    """Return the magnitudes of the codes, and x with the signs of the codes."""
    if codes.type.count == 32:
        kind = ir.FunctionType(codes.type, [codes.type] * 2)
        magnitudes = code.intrinsic("llvm.x86.avx2.psign.b", kind, [codes, codes])
        return magnitudes, code.intrinsic("llvm.x86.avx2.psign.b", kind, [x, codes])
    build, nothing = code.build, ir.Constant(codes.type, None)
    is_below = build.icmp_signed("<", codes, nothing)
    return tuple(build.select(is_below, build.sub(nothing, each), each) for each in (codes, x))


def pinned(code: Code, register: Value) -> Value:
    kind = ir.FunctionType(register.type, [register.type])
    return code.build.call(ir.InlineAsm(kind, "", "=v,0", side_effect=True), [register])


def nearest(code: Code, reals: Value) -> Value:
    """Return float32 numbers rounded to int32. NaN and large numbers become the smallest integer."""
    lanes = reals.type.count
    kind = code.registers(WORD, lanes)
    if lanes == 8:
        return code.intrinsic("llvm.x86.avx.cvt.ps2dq.256", ir.FunctionType(kind, [reals.type]), [reals])
    both = ir.FunctionType(kind, [reals.type, kind, HALF_WORD, WORD])
    every, as_set = ir.Constant(HALF_WORD, 0xFFFF), ir.Constant(WORD, 4)
    return code.intrinsic("llvm.x86.avx512.mask.cvtps2dq.512", both, [reals, ir.Constant(kind, None), every, as_set])
