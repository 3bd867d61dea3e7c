"""An instruction set as a value: what a generator of kernels must know of the CPU that it writes for."""

from __future__ import annotations

from dataclasses import dataclass

from smoe.bounds import BF16, INT8
from smoe.cpu_isa import AARCH64, X86
from smoe.kernels.jit import cpu_has


@dataclass(frozen=True)
class Isa:
    """One of the instruction sets that kernels are written for."""

    name: str
    lanes: int
    """float32 numbers that are computed together: of one register, or of two small ones."""
    registers: int
    """So many of those."""
    needs: tuple[str, ...]
    """Features by LLVM's names."""
    has_bf16_dots: bool = False
    """Products of pairs of bf16 numbers, added up in float32, in one instruction."""

    has_int8_dots: bool = False
    """Products of four bytes each, added up in 32 bits, in one instruction."""

    has_signed_bytes: bool = False
    """Where bytes are multiplied, both may be signed; else codes are not, as far as that can be."""

    family: str = X86

    @property
    def is_here(self) -> bool:
        """Whether this CPU has it, and `SMOE_MAX_CPU_ISA` allows it."""
        return cpu_has(*self.needs)

    @property
    def attributes(self) -> str:
        """Of a function, in LLVM's language: registers of full width, which LLVM avoids on some CPUs of `X86`."""
        if self.family == AARCH64:
            return "nounwind"
        bits = 32 * self.lanes
        return f'nounwind "prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}"'


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c")
AVX512_BF16 = Isa("AVX-512 BF16", 16, 32, (*_AVX512, "avx512bf16"), has_bf16_dots=True)
AVX512 = Isa("AVX-512", 16, 32, _AVX512)
AVX2 = Isa("AVX2", 8, 16, ("avx2", "fma", "f16c"))
NEON = Isa("NEON", 8, 16, ("neon",), has_signed_bytes=True, family=AARCH64)
ISAS = (AVX512_BF16, AVX512, AVX2, NEON)
"""Those that kernels are written for: of each family, widest first."""
AVX512_VNNI = Isa("AVX-512 VNNI", 16, 32, (*_AVX512, "avx512vnni"), has_int8_dots=True)
AVX2_VNNI = Isa("AVX-VNNI", 8, 16, (*AVX2.needs, "avxvnni"), has_int8_dots=True)
NEON_DOTPROD = Isa("NEON with dot products", 8, 16, (*NEON.needs, "dotprod"), has_int8_dots=True,
                   has_signed_bytes=True, family=AARCH64)  # fmt: skip
ISAS_OF: dict[str, tuple[Isa, ...]] = {
    BF16: ISAS,
    INT8: (AVX512_VNNI, AVX512, AVX2_VNNI, AVX2, NEON_DOTPROD, NEON),
}
"""Those that products with quantised matrices are written for, by what a row of x is multiplied as."""


_AMD = "sse4a"
"""Only AMD's CPUs have it."""


def read_once_locality() -> int:
    """LLVM's locality of a prefetch of weights that are read once: past the second cache level where the CPU can.

    That level then holds what Python needs between two products, and the weights themselves come faster: on Zen 5 bf16
    at 66 to 80 GB/s in the place of 62. Other CPUs fetch into the second level: nothing else was measured there.
    """
    return 0 if cpu_has(_AMD) else 2


def widest(activations: str = BF16) -> Isa | None:
    """The first of these instruction sets that this CPU has."""
    return next((isa for isa in ISAS_OF[activations] if isa.is_here), None)
