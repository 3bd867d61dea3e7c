"""Instruction sets as values: the properties of a CPU that the generators of kernels need."""

from __future__ import annotations

from dataclasses import dataclass

from smoe.bounds import BF16, INT8
from smoe.cpu_isa import AARCH64, X86
from smoe.kernels.jit import cpu_has


@dataclass(frozen=True)
class Isa:
    """An instruction set for which kernels can be generated, with its properties."""

    name: str
    lanes: int
    """The number of float32 numbers that are computed together, in one register or two small ones."""
    registers: int
    """The number of registers of `lanes` numbers."""
    needs: tuple[str, ...]
    """The CPU features that it requires, by LLVM's names."""
    has_bf16_dots: bool = False
    """Whether one instruction adds products of pairs of bf16 numbers in float32."""

    has_int8_dots: bool = False
    """Whether one instruction adds products of four bytes in 32 bits."""

    has_signed_bytes: bool = False
    """Whether both operands of byte products may be signed; otherwise codes are unsigned where possible."""

    interleaves: bool = False
    """Whether products with rows in 8 bits are faster on interleaved rows of a matrix (`interleaving.py`). It was
    measured with AVX2 and AVX-512 VNNI."""

    family: str = X86

    @property
    def is_here(self) -> bool:
        """Whether this CPU has the instruction set, and `SMOE_MAX_CPU_ISA` allows it."""
        return cpu_has(*self.needs)

    @property
    def attributes(self) -> str:
        """The attributes of functions in LLVM text. On x86 they request registers of full width, which LLVM avoids on
        some CPUs."""
        if self.family == AARCH64:
            return "nounwind"
        bits = 32 * self.lanes
        return f'nounwind "prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}"'


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c")
AVX512_BF16 = Isa("AVX-512 BF16", 16, 32, (*_AVX512, "avx512bf16"), has_bf16_dots=True)
AVX512 = Isa("AVX-512", 16, 32, _AVX512, interleaves=True)
AVX2 = Isa("AVX2", 8, 16, ("avx2", "fma", "f16c"), interleaves=True)
NEON = Isa("NEON", 8, 16, ("neon",), has_signed_bytes=True, family=AARCH64)
ISAS = (AVX512_BF16, AVX512, AVX2, NEON)
"""The instruction sets for kernels. Within each family the widest is first."""
AVX512_VNNI = Isa("AVX-512 VNNI", 16, 32, (*_AVX512, "avx512vnni"), has_int8_dots=True, interleaves=True)
AVX2_VNNI = Isa("AVX-VNNI", 8, 16, (*AVX2.needs, "avxvnni"), has_int8_dots=True, interleaves=True)
NEON_DOTPROD = Isa("NEON with dot products", 8, 16, (*NEON.needs, "dotprod"), has_int8_dots=True,
                   has_signed_bytes=True, family=AARCH64)  # fmt: skip
ISAS_OF: dict[str, tuple[Isa, ...]] = {
    BF16: ISAS,
    INT8: (AVX512_VNNI, AVX512, AVX2_VNNI, AVX2, NEON_DOTPROD, NEON),
}
"""The instruction sets for products with quantized matrices, by the type to which activation rows are rounded."""


_AMD = "sse4a"
"""A CPU feature that only AMD's CPUs have."""
_ZEN_5 = (_AMD, "movdir64b")
"""CPU features that AMD's CPUs have together since Zen 5."""


def read_once_locality() -> int:
    """Return the locality, in LLVM's sense, for prefetching weights that are read once.

    On AMD's CPUs since Zen 5 the prefetch bypasses the second-level cache. That cache then holds what Python needs
    between two products, and weights arrive faster: on Zen 5, bf16 at 66 to 80 GB/s instead of 62. On Zen 4 the same
    prefetch is no faster than none: with it, one thread reads Q4_K at 11 GB/s, and through the second-level cache at
    28. On other CPUs no other locality was measured.
    """
    return 0 if cpu_has(*_ZEN_5) else 2


def cpu_prefetches_rows() -> bool:
    """Return whether this CPU itself prefetches rows that are read in order faster than code does.

    It was measured on Zen 4 (two threads, bf16 with AVX2): 33 GB/s without prefetches of ours, 29 with them.
    """
    return cpu_has(_AMD) and not cpu_has(*_ZEN_5)


def widest(activations: str = BF16) -> Isa | None:
    """Return the first instruction set in `ISAS_OF[activations]` that this CPU has, or None if this CPU has none of
    them. `activations`: the type to which activation rows are rounded."""
    return next((isa for isa in ISAS_OF[activations] if isa.is_here), None)
