"""Generates machine code from Python: a thin layer over llvmlite's builder, in which registers are Python values.

A function (`function.py`) is built by calling methods in the order of the computation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from smoe.cpu_isa import AARCH64
from smoe.kernels import neon, x86
from smoe.kernels.function import BuiltFunction, integer
from smoe.kernels.isa import Isa, read_once_locality
from smoe.kernels.kinds import BYTE, FLOAT, HALF_WORD, LONG, POINTER, WORD, Value


@functools.lru_cache(maxsize=4096)
def _integers(kind: ir.Type, values: tuple[int, ...]) -> Value:
    """Return a constant register of integers."""
    return ir.Constant(ir.VectorType(kind, len(values)), [integer(kind, value) for value in values])


def text_of(module: ir.Module, attributes: str) -> str:
    """Return the LLVM text of a module, in which all functions have the attributes `attributes`."""
    lines = [line for line in str(module).splitlines() if not line.startswith("target ")]
    defined = [f"{line} #0" if line.startswith("define ") else line for line in lines]
    return "\n".join([*defined, f"attributes #0 = {{ {attributes} }}", ""])


def shaped(kind: ir.Type, like: ir.Type) -> ir.Type:
    """Return the type `kind` if `like` is the type of a number, or the type of a register with as many numbers as a
    register of the type `like`."""
    return ir.VectorType(kind, like.count) if isinstance(like, ir.VectorType) else kind


def copies(kind: ir.Type, value: float) -> Value:
    """Return a constant of the type `kind`: a number, or a register with copies of it."""
    if not isinstance(kind, ir.VectorType):
        return ir.Constant(kind, value)
    return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)


class Code(BuiltFunction):
    """A function of machine code that is being built. Addresses are byte pointers, and offsets are in bytes. A register
    [n] is a vector of n numbers."""

    def __init__(
        self,
        module: ir.Module,
        isa: Isa,
        name: str,
        arguments: Sequence[str],
        is_local: bool = False,
        returns: ir.Type | None = None,
    ) -> None:
        """All arguments but `isa` are those of `BuiltFunction`."""
        super().__init__(module, name, arguments, is_local, returns)
        self.isa = isa
        self._own: Any = neon if isa.family == AARCH64 else x86
        self._nowhere: Value = None

    def reals(self, value: float, lanes: int | None = None) -> Value:
        """Return a constant register with `lanes` copies of a float32."""
        return ir.Constant(self.registers(FLOAT, lanes), [ir.Constant(FLOAT, value)] * (lanes or self.isa.lanes))

    def halves(self, values: Sequence[int]) -> Value:
        """Return a constant register of 16-bit integers."""
        return _integers(HALF_WORD, tuple(values))

    def bytes(self, values: Sequence[int]) -> Value:
        """Return a constant register of bytes, given as numbers from -128 to 255."""
        return _integers(BYTE, tuple(values))

    def words(self, values: Sequence[int]) -> Value:
        """Return a constant register of 32-bit integers."""
        return _integers(WORD, tuple(values))

    def registers(self, kind: ir.Type, lanes: int | None = None) -> ir.VectorType:
        """Return the type of a register with `lanes` numbers of the type `kind`."""
        return ir.VectorType(kind, lanes or self.isa.lanes)

    def at(self, pointer: Value, offset: Value | int) -> Value:
        """Return the address that is `offset` bytes after `pointer`."""
        return self.build.gep(pointer, [self.number(offset)], source_etype=BYTE)

    def element(self, pointer: Value, kind: ir.Type, index: Value | int) -> Value:
        """Return the address of element `index` of an array of numbers of the type `kind`."""
        return self.build.gep(pointer, [self.number(index)], source_etype=kind)

    def load(self, kind: ir.Type, pointer: Value, align: int = 1) -> Value:
        """Return the value of the type `kind` that is stored at an address."""
        return self.build.load(pointer, align=align, typ=kind)

    def given(self, pointer: Value, names: Sequence[str]) -> dict[str, Value]:
        """Return the 64-bit integers that are stored at an address, by name."""
        return {name: self.load(LONG, self.element(pointer, LONG, n), 8) for n, name in enumerate(names)}

    def pointer(self, address: Value) -> Value:
        """Return an address, given as an integer, as a pointer."""
        return self.build.inttoptr(address, POINTER)

    def real(self, bits: Value) -> Value:
        """Return the float32 whose bits are the lower half of a 64-bit integer."""
        return self.build.bitcast(self.build.trunc(bits, WORD), FLOAT)

    def store(self, value: Value, pointer: Value, align: int = 1) -> None:
        self.build.store(value, pointer, align=align)

    def scratch(self, count: Value, kind: ir.Type = BYTE) -> Value:
        """Return the address of `count` bytes on the stack, or as many numbers of the type `kind`, aligned to a cache
        line."""
        memory = self.build.alloca(kind, size=count)
        memory.align = 64
        memory.type = POINTER  # LLVM no longer has typed pointers, which llvmlite still creates
        return memory

    def constant(self, name: str, data: Sequence[int]) -> Value:
        """Return the address of constant bytes in this module, aligned to a cache line."""
        known = self._module.globals.get(name)
        if known is None:
            kind = ir.ArrayType(BYTE, len(data))
            known = ir.GlobalVariable(self._module, kind, name)
            known.linkage, known.global_constant, known.align = "internal", True, 64
            known.initializer = ir.Constant(kind, bytearray(data))
            known.type = POINTER
        return known

    def gathered(self, table: Value, places: Value, width: int) -> Value:
        """Return entries of the table in memory at the address `table`, each `width` bytes (4 or 8), as integers [n].
        `places` [n]: the indices of the entries."""
        return self._own.gathered(self, table, places, width)

    def loaded_each(self, kind: ir.Type, addresses: Sequence[Value]) -> Value:
        """Return a register with the values of the type `kind` that are stored at `addresses`."""
        found = ir.Constant(self.registers(kind, len(addresses)), ir.Undefined)
        for n, address in enumerate(addresses):
            found = self.build.insert_element(found, self.load(kind, address), integer(WORD, n))
        return found

    def looked_up_halves(self, table: Sequence[int], codes: Value) -> Value:
        """Return 16-bit numbers from a table of 16, by codes [32]. Only the four lowest bits of a code have an
        effect."""
        return self._own.looked_up_halves(self, table, codes)

    def looked_up_bytes(self, table: Sequence[int], codes: Value) -> Value:
        """Return bytes from a table of 16, by codes [32 or 64]. All codes must be below 16."""
        return self._own.looked_up_bytes(self, table, codes)

    def picked_bytes(self, table: Sequence[int], places: Value) -> Value:
        """Return bytes from a table of 128, by indices [64], on CPUs that can do this. Only the seven lowest bits of an
        index have an effect."""
        return self._own.picked_bytes(self, table, places)

    def looked_up(self, table: Sequence[float], codes: Value) -> Value:
        """Return floats from a table of 16, by codes. Only the four lowest bits of a code have an effect. Every float
        must be exact in bf16."""
        return self._own.looked_up(self, table, codes)

    def where_set(self, word: Value, numbers: Value, others: Value) -> Value:
        """Return a register with numbers from two registers. The bits of `word`, lowest first, select the number: a set
        bit that of `numbers`, a clear bit that of `others`."""
        return self._own.where_set(self, word, numbers, others)

    def smaller(self, a: Value, b: Value) -> Value:
        """Return the smaller one of two 64-bit integers."""
        return self.intrinsic("llvm.smin.i64", ir.FunctionType(LONG, [LONG, LONG]), [a, b])

    def observed(self, pointer: Value) -> Value:
        """Return the 64-bit integer at an address, read before all later reads of this thread."""
        return self.build.load_atomic(pointer, "acquire", 8, typ=LONG)

    def publish(self, value: Value, pointer: Value) -> None:
        """Store a 64-bit integer at an address, after all earlier writes of this thread."""
        block = self.build.block
        self.build._insert(ir.instructions.StoreAtomicInstr(block, value, pointer, "seq_cst", 8))

    def counted(self, pointer: Value) -> Value:
        """Add one to the 64-bit integer at an address, after all earlier writes of this thread. Return the number
        before."""
        return self.build.atomic_rmw("add", pointer, self.number(1), "seq_cst")

    def system_register(self, name: str) -> Value:
        """Return the 64-bit integer in a register of the system."""
        kind = ir.FunctionType(LONG, [ir.MetaDataType()])
        node = self._module.add_metadata([ir.MetaDataString(self._module, name)])
        return self.intrinsic("llvm.read_volatile_register.i64", kind, [node])

    def prefetch(self, pointer: Value, is_read_once: bool = False) -> None:
        """Prefetch a cache line into the second-level cache. An invalid address has no effect.

        `is_read_once`: prefetch with the locality that `read_once_locality` returns.
        """
        kind = ir.FunctionType(ir.VoidType(), [POINTER, WORD, WORD, WORD])
        locality = read_once_locality() if is_read_once else 2
        self.intrinsic("llvm.prefetch.p0", kind, [pointer, *(integer(WORD, flag) for flag in (0, locality, 1))])

    def pinned(self, register: Value) -> Value:
        """Return the register, and make LLVM compute it after the preceding prefetches and pinned registers and before
        the following ones.

        LLVM reorders instructions within a basic block. It would load and unpack a whole block first and spill
        registers to memory, which takes a third of the time of a product on AVX2.
        """
        return self._own.pinned(self, register)

    def cut(self) -> None:
        """Prevent LLVM from moving memory accesses across this point.

        Otherwise LLVM would group all prefetches of a basic block, which are more than a CPU can have in flight.
        """
        kind = ir.FunctionType(ir.VoidType(), [])
        self.build.call(ir.InlineAsm(kind, "", "~{memory}", side_effect=True), [])

    @property
    def nowhere(self) -> Value:
        """The address of as many readable bytes as a register has, with undefined content."""
        if self._nowhere is None:
            with self.build.goto_entry_block():
                self._nowhere = self.build.alloca(self.registers(WORD))
                self._nowhere.type = POINTER
        return self._nowhere

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return a * b + c of registers, rounded only once."""
        return self.intrinsic(f"llvm.fma.v{a.type.count}f32", ir.FunctionType(a.type, [a.type] * 3), [a, b, c])

    def times(self, number: Value, factor: float) -> Value:
        """Return a float32 number or register multiplied by a constant."""
        if factor == 1:
            return number
        if factor == -1:
            return self.build.fneg(number)
        by = self.reals(factor, number.type.count) if isinstance(number.type, ir.VectorType) else None
        return self.build.fmul(number, ir.Constant(FLOAT, factor) if by is None else by)

    def dots(self, total: Value, a: Value, b: Value) -> Value:
        """Return total [n] + a . b, where every lane has two bf16 numbers of a and two of b (16-bit integers [2n])."""
        return self._own.dots(self, total, a, b)

    def paired(self, even: Value, odd: Value) -> Value:
        """Return two float32 registers [n] as bf16 numbers in alternation (16-bit integers [2n]). Only on CPUs with the
        instruction for `dots`."""
        return self._own.paired(self, even, odd)

    def dot_sum(self, most: int, is_signed: bool) -> Any:
        """Return an accumulator for dot products of four bytes: `add(codes [4n], x [4n])` adds products, `total()`
        returns their sums, int32 [n].

        `most`: the largest magnitude of a code. `is_signed`: whether codes are signed. x is signed and never -128. On
        CPUs without a dot product instruction codes must be at most 128, because two products are added in 16 bits.
        With the instruction codes must be unsigned or, if the instruction set `has_signed_bytes`, at most 127.
        """
        return self._own.DotSum(self, most, is_signed)

    def nearest(self, reals: Value) -> Value:
        """Return float32 numbers rounded to int32, ties to even. For NaN and large numbers the result is undefined."""
        return self._own.nearest(self, reals)

    def splat(self, value: Value, lanes: int | None = None) -> Value:
        """Return a register in which every lane is a copy of the number `value`."""
        kind = self.registers(value.type, lanes)
        one = self.build.insert_element(ir.Constant(kind, ir.Undefined), value, integer(WORD, 0))
        return self.pick(one, [0] * kind.count)

    def lane(self, register: Value, n: int) -> Value:
        """Return a register in which every lane is a copy of lane `n` of `register`."""
        return self.pick(register, [n] * self.isa.lanes)

    def pick(self, register: Value, lanes: Sequence[int]) -> Value:
        """Return a register with the numbers of `register` at the indices `lanes`, in this order."""
        return self.build.shuffle_vector(register, ir.Constant(register.type, ir.Undefined), self.words(lanes))

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """Return n registers of n numbers transposed. In each round, pairs of registers exchange halves."""
        found, lanes, step = list(rows), len(rows), 1
        while step < lanes:
            for n in (n for n in range(lanes) if not n & step):
                low, high = found[n], found[n + step]
                for at, offset in ((n, 0), (n + step, step)):
                    places = [offset + (lanes + lane - step if lane & step else lane) for lane in range(lanes)]
                    found[at] = self.build.shuffle_vector(low, high, self.words(places))
            step *= 2
        return found

    def joined(self, registers: Sequence[Value]) -> Value:
        """Return the concatenation of one or two registers of equal size."""
        if len(registers) == 1:
            return registers[0]
        return self.build.shuffle_vector(*registers, self.words(range(2 * registers[0].type.count)))

    def summed(self, register: Value) -> Value:
        """Return the sum of the numbers in a register. The register's two halves are added, then the two halves of the
        result, until one number is left."""
        while register.type.count > 1:
            half = register.type.count // 2
            low, high = range(half), range(half, 2 * half)
            register = self.build.fadd(self.pick(register, list(low)), self.pick(register, list(high)))
        return self.build.extract_element(register, integer(WORD, 0))

    def widened(self, halves: Value) -> Value:
        """Return bf16 numbers, given as 16-bit integers, converted to float32."""
        wide = self.build.zext(halves, shaped(WORD, halves.type))
        high = self.build.shl(wide, copies(wide.type, 16))
        return self.build.bitcast(high, shaped(FLOAT, halves.type))

    def even_and_odd(self, pairs: Value) -> tuple[Value, Value]:
        """Return pairs of bf16 numbers, given as 32-bit integers, as two float32 registers: the first numbers and the
        second numbers of all pairs."""
        lanes, kind = pairs.type.count, self.registers(FLOAT, pairs.type.count)
        even = self.build.shl(pairs, self.words([16] * lanes))
        odd = self.build.and_(pairs, self.words([0xFFFF0000] * lanes))
        return self.build.bitcast(even, kind), self.build.bitcast(odd, kind)

    def biased(self, totals: Value, bias: Value, place: Value) -> Value:
        """Return float32 totals plus bf16 biases, which begin `place` bytes after the address `bias`. A null address
        adds nothing."""
        has_bias = self.build.icmp_unsigned("!=", bias, ir.Constant(bias.type, None))
        source = self.build.select(has_bias, self.at(bias, place), self.nowhere)
        numbers = self.widened(self.load(self.registers(HALF_WORD, totals.type.count), source))
        return self.build.select(has_bias, self.build.fadd(totals, numbers), totals)

    def rounded(self, reals: Value) -> Value:
        """Return float32 numbers rounded to bf16, as 16-bit integers, ties to even. Every NaN becomes the same NaN."""
        return self.halved(self.near(reals))

    def near(self, reals: Value) -> Value:
        """Return float32 numbers rounded to bf16, as float32, ties to even. Every NaN becomes the same NaN."""
        bits = self.build.bitcast(reals, shaped(WORD, reals.type))
        near, is_nan = self.near_bits(bits), self.build.fcmp_unordered("uno", reals, reals)
        return self.build.bitcast(self.build.select(is_nan, copies(bits.type, 0x7FC00000), near), reals.type)

    def near_bits(self, bits: Value) -> Value:
        """Return the bits of float32 numbers other than NaN rounded to bf16, ties to even. The lower half is zero."""
        odd = self.build.and_(self.build.lshr(bits, copies(bits.type, 16)), copies(bits.type, 1))
        up = self.build.add(bits, self.build.add(odd, copies(bits.type, 0x7FFF)))
        return self.build.and_(up, copies(bits.type, -65536))

    def halved(self, reals: Value) -> Value:
        """Return float32 numbers that are exact in bf16 as 16-bit integers."""
        bits = self.build.bitcast(reals, shaped(WORD, reals.type))
        return self.build.trunc(self.build.lshr(bits, copies(bits.type, 16)), shaped(HALF_WORD, reals.type))
