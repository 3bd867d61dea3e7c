"""From LLVM's intermediate language to a callable: machine code for this very CPU, and no compiler to install."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

try:
    import llvmlite.binding as llvm
except ImportError:  # the kernels are an acceleration: without them everything still works
    llvm = None

_engines: list[Any] = []
"""They own the machine code, which callables outlive modules."""


def is_available() -> bool:
    """Whether anything can be compiled here."""
    return llvm is not None


def cpu_has(*features: str) -> bool:
    """Whether this CPU, and the operating system on it, has all the instruction sets named as LLVM names them."""
    if llvm is None:
        return False
    found = llvm.get_host_cpu_features()
    return all(found.get(feature, False) for feature in features)


def compile_functions(source: str, signatures: Mapping[str, Sequence[type]]) -> list[Callable[..., None]]:
    """Functions of an LLVM module in text form, without results. Calling one releases the interpreter lock.

    Takes some 50 ms. Raises `RuntimeError` with LLVM's message where the text is wrong.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
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
