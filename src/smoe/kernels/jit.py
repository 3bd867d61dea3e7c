"""From LLVM's intermediate language to a callable: machine code for this very CPU, and no compiler to install.

    in the user's cache      object code --> memory                              `object_cache.py`, `machine_code.py`
    else, LLVM loaded here   source --> object code --> cache, memory            `compiler.py`
    else                     the same by a process that then ends: LLVM takes 75 MiB of the process that loads it

Where code cannot be brought into a process by us (`machine_code.py` knows Linux only), LLVM is loaded and does it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from smoe.cpu_isa import CPU_ISA, max_cpu_isa
from smoe.kernels import compiler, machine_code, object_cache

_kept: list[Any] = []
"""What owns the machine code, which callables outlive modules."""


class Source(NamedTuple):
    """A module in LLVM's language that is not generated unless it must be compiled, which may take as long again."""

    make: Callable[..., str]
    """A function of a module of ours."""
    arguments: tuple[object, ...] = ()
    """What it is given: values whose `repr` says all there is of them."""

    @property
    def key(self) -> str:
        """Tells it apart from every other one: by its text where the function may depend on more than what it is
        given, as one within another function does."""
        if "<" in self.make.__qualname__:
            return self.text()
        return f"{self.make.__module__}.{self.make.__qualname__}{self.arguments!r}"

    def text(self) -> str:
        """Generates it."""
        return self.make(*self.arguments)


@functools.cache
def llvm() -> Any:
    """LLVM, or None without it: the kernels are an acceleration, and without them everything still works."""
    try:
        import llvmlite.binding
    except ImportError:
        return None
    return llvmlite.binding


def is_available() -> bool:
    """Whether anything can be compiled here."""
    return bool(_host_features()) if machine_code.is_known() else llvm() is not None


def _is_loaded() -> bool:
    """Whether this process has paid for LLVM."""
    return "llvmlite.binding" in sys.modules


@functools.cache
def _version() -> str:
    """LLVM's, as llvmlite counts it; empty without it. Does not load LLVM."""
    if importlib.util.find_spec("llvmlite") is None:
        return ""
    import llvmlite

    return str(llvmlite.__version__)


_FIRST_ISA = (("amx", "all"), ("avx10", "all"), ("avx512bf16", "avx512_bf16"), ("avx512fp16", "all"),
              ("avx512", "avx512"), ("avxvnni", "avx_vnni"), ("avx", "avx2"), ("dotprod", "neon_dotprod"))  # fmt: skip
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
    if not machine_code.is_known():
        return compiler.features_here(llvm())
    if not _version():
        return {}
    key = object_cache.key_of(_version(), "features")
    known = object_cache.read(key)
    if known is None:
        found = compiler.features_here(llvm()) if _is_loaded() else compiler.host_features()
        if found:  # else llvmlite is broken, and may be repaired
            object_cache.write(key, json.dumps(found).encode())
        return found
    stored: dict[str, bool] = json.loads(known)
    return stored


def _features() -> dict[str, bool]:
    """The same without those above `SMOE_MAX_CPU_ISA`."""
    found, most = dict(_host_features()), CPU_ISA.index(max_cpu_isa())
    for feature in found:
        first = next((isa for begins, isa in _FIRST_ISA if feature.startswith(begins)), "none")
        if CPU_ISA.index(first) > most:
            found[feature] = False
    return found


def _flattened(features: Mapping[str, bool]) -> str:
    """In LLVM's form."""
    return ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(features.items()))


def compile_functions(source: Source, signatures: Mapping[str, Sequence[type]]) -> list[Callable[..., None]]:
    """Functions of a module, without results. Calling one releases the interpreter lock.

    Takes some 50 ms to 1 s, and 2 ms where the object code is in the user's cache. Raises `RuntimeError` with LLVM's
    message where the text is wrong.
    """
    features = _flattened(_features())
    if machine_code.is_known():
        code = machine_code.Loaded(_image(source, features))
        _kept.append(code)
        addresses = [code.address_of(name) for name in signatures]
    else:
        addresses = _compiled_here(source.text(), features, list(signatures))
    return [
        ctypes.CFUNCTYPE(None, *arguments)(address)
        for address, arguments in zip(addresses, signatures.values(), strict=True)
    ]


def _image(source: Source, features: str) -> machine_code.Image:
    """From the cache; else it is compiled, and stored there."""
    key = object_cache.key_of(_version(), features, source.key)
    known = object_cache.read(key)
    if known is not None:
        return machine_code.linked(known)
    text = source.text()
    made = compiler.object_file(llvm(), text, features) if _is_loaded() else compiler.compiled(text, features)
    object_cache.write(key, made)
    return machine_code.linked(made)


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
