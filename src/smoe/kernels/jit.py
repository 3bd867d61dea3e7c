"""From LLVM's intermediate language to a callable: machine code for this very CPU, and no compiler to install.

LLVM takes 75 MiB of a process that compiles with it. One that is to stay small has it done elsewhere
(`compile_elsewhere`): in a process that ends when it has said what the code is (`compiler.py`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smoe.cpu_isa import CPU_ISA, max_cpu_isa
from smoe.kernels import compiler, machine_code

_kept: list[Any] = []
"""What owns the machine code, which callables outlive modules."""
_is_elsewhere = False


@functools.cache
def llvm() -> Any:
    """LLVM, or None without it: the kernels are an acceleration, and without them everything still works."""
    try:
        import llvmlite.binding
    except ImportError:
        return None
    return llvmlite.binding


def compile_elsewhere() -> None:
    """From now on, and before anything was compiled: LLVM is not loaded here. Where that cannot be done (`machine_code`
    knows Linux only), everything stays as it is."""
    global _is_elsewhere
    _is_elsewhere = machine_code.is_known()


def is_available() -> bool:
    """Whether anything can be compiled here."""
    return bool(_host_features()) if _is_elsewhere else llvm() is not None


_FIRST_ISA = (("amx", "all"), ("avx10", "all"), ("avx512bf16", "avx512_bf16"), ("avx512fp16", "all"),
              ("avx512", "avx512"), ("avx", "avx2"), ("dotprod", "neon_dotprod"))  # fmt: skip
"""How LLVM's names of extensions begin, and the first of `CPU_ISA` that has them; the first that fits counts. NEON is
part of every aarch64: code is made with it wherever any is."""


def cpu_has(*features: str) -> bool:
    """Whether this CPU, and the operating system on it, has all the instruction sets named as LLVM names them, and
    `SMOE_MAX_CPU_ISA` allows them."""
    if max_cpu_isa() == "none" or not is_available():
        return False
    found = _features()
    return all(found.get(feature, False) for feature in features)


@functools.cache
def _host_features() -> dict[str, bool]:
    """This CPU's extensions by LLVM's names; empty without LLVM."""
    if _is_elsewhere:
        return compiler.host_features()
    return compiler.features_here(llvm())


def _features() -> dict[str, bool]:
    """The same without those above `SMOE_MAX_CPU_ISA`."""
    found, most = dict(_host_features()), CPU_ISA.index(max_cpu_isa())
    for feature in found:
        first = next((isa for begins, isa in _FIRST_ISA if feature.startswith(begins)), "none")
        if CPU_ISA.index(first) > most:
            found[feature] = False
    return found


def _flattened(features: Mapping[str, bool]) -> str:
    """As LLVM wants to be told them."""
    return ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(features.items()))


def compile_functions(source: str, signatures: Mapping[str, Sequence[type]]) -> list[Callable[..., None]]:
    """Functions of an LLVM module in text form, without results. Calling one releases the interpreter lock.

    Takes some 50 ms, elsewhere 300. Raises `RuntimeError` with LLVM's message where the text is wrong.
    """
    features = _flattened(_features())
    if _is_elsewhere:
        code = machine_code.Loaded(machine_code.linked(compiler.compiled(source, features)))
        _kept.append(code)
        addresses = [code.address_of(name) for name in signatures]
    else:
        addresses = _compiled_here(source, features, list(signatures))
    return [
        ctypes.CFUNCTYPE(None, *arguments)(address)
        for address, arguments in zip(addresses, signatures.values(), strict=True)
    ]


def _compiled_here(source: str, features: str, names: Sequence[str]) -> list[int]:
    module, machine = compiler.parsed(llvm(), source, features)
    engine = llvm().create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _kept.append(engine)
    return [engine.get_function_address(name) for name in names]


def address_of(function: Callable[..., None]) -> int:
    """Where a function's machine code begins, for machine code that is to call it."""
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None, "a function of no address"
    return address
