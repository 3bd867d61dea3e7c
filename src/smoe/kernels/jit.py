"""From LLVM's intermediate language to a callable: machine code for this very CPU, and no compiler to install."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smoe.cpu_isa import CPU_ISA, max_cpu_isa

try:
    import llvmlite.binding as llvm
except ImportError:  # the kernels are an acceleration: without them everything still works
    llvm = None

_engines: list[Any] = []
"""They own the machine code, which callables outlive modules."""


def is_available() -> bool:
    """Whether anything can be compiled here."""
    return llvm is not None


_FIRST_ISA = (("amx", "all"), ("avx10", "all"), ("avx512bf16", "avx512_bf16"), ("avx512fp16", "all"),
              ("avx512", "avx512"), ("avx", "avx2"))  # fmt: skip
"""How LLVM's names of extensions begin, and the first of `CPU_ISA` that has them; the first that fits counts."""


def cpu_has(*features: str) -> bool:
    """Whether this CPU, and the operating system on it, has all the instruction sets named as LLVM names them, and
    `SMOE_MAX_CPU_ISA` allows them."""
    if max_cpu_isa() == "none" or llvm is None:
        return False
    found = _features()
    return all(found.get(feature, False) for feature in features)


def _features() -> Any:
    """LLVM's map of this CPU's extensions, without those above `SMOE_MAX_CPU_ISA`."""
    found, most = llvm.get_host_cpu_features(), CPU_ISA.index(max_cpu_isa())
    for feature in found:
        first = next((isa for begins, isa in _FIRST_ISA if feature.startswith(begins)), "none")
        if CPU_ISA.index(first) > most:
            found[feature] = False
    return found


def compile_functions(source: str, signatures: Mapping[str, Sequence[type]]) -> list[Callable[..., None]]:
    """Functions of an LLVM module in text form, without results. Calling one releases the interpreter lock.

    Takes some 50 ms. Raises `RuntimeError` with LLVM's message where the text is wrong.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_features().flatten(), opt=3
    )
    module = llvm.parse_assembly(source)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _engines.append(engine)
    return [
        ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address(name)) for name, arguments in signatures.items()
    ]


def address_of(function: Callable[..., None]) -> int:
    """Where a function's machine code begins, for machine code that is to call it."""
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None, "a function of no address"
    return address
