"""Compiles LLVM text to functions for this CPU, without an installed compiler.

There are four ways, in this order:

    object code is in the user's cache      it is loaded into memory          `object_cache.py`, `machine_code.py`
    it is being compiled ahead              another process has begun, and will end soon     `compiling_ahead.py`
    LLVM is loaded in this process          it compiles here; the object code is stored in the cache and loaded
    else                                    another process compiles and then ends: LLVM would take 75 MiB of this one

smoe can load object code itself only on Linux (`machine_code.py`). On other systems, LLVM is loaded and does that.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from smoe.cpu_isa import CPU_ISA, max_cpu_isa
from smoe.garbage import collection_paused
from smoe.kernels import compiler, compiling_ahead, machine_code, object_cache

_kept: list[Any] = []
"""The owners of loaded machine code, which is never freed: callables may outlive other references to its owner, and
daemon threads may still run it while Python ends and empties its modules."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))

_ahead: list[compiling_ahead.Compiling] = []
"""What other processes compile or have compiled."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ahead.clear)  # a forked process lacks the threads that receive results


class Source(NamedTuple):
    """LLVM text that is generated only if it must be compiled, because generating may take as long as compiling."""

    make: Callable[..., str]
    """A function of a module (not a nested one) that returns the text."""
    arguments: tuple[object, ...] = ()
    """The arguments of the function. Their `repr` must contain their whole value."""

    @property
    def key(self) -> str:
        """A string that identifies the text: the name of the function `make` and its arguments. For a nested function,
        the key is the text itself."""
        if "<" in self.make.__qualname__:
            return self.text()
        return f"{self.make.__module__}.{self.make.__qualname__}{self.arguments!r}"

    def text(self) -> str:
        """Return the generated text. Garbage collection is paused, because it would take half of the time: llvmlite
        makes an object for every instruction and keeps all of them."""
        with collection_paused():
            return self.make(*self.arguments)


@functools.cache
def llvm() -> Any:
    """Return llvmlite's binding of LLVM, or None if llvmlite is missing. (Kernels are optional.)"""
    try:
        import llvmlite.binding
    except ImportError:
        return None
    return llvmlite.binding


def is_available() -> bool:
    """Return whether smoe can compile machine code on this machine."""
    return bool(_host_features()) if machine_code.is_known() else llvm() is not None


def _is_loaded() -> bool:
    """Return whether this process has loaded LLVM."""
    return "llvmlite.binding" in sys.modules


@functools.cache
def llvmlite_version() -> str:
    """Return llvmlite's version, or an empty string if it is missing; this does not load LLVM."""
    if importlib.util.find_spec("llvmlite") is None:
        return ""
    import llvmlite

    return str(llvmlite.__version__)


_FIRST_ISA = (("amx", "all"), ("avx10", "all"), ("avx512bf16", "avx512_bf16"), ("avx512fp16", "all"),
              ("avx512", "avx512"), ("avxvnni", "avx_vnni"), ("avx", "avx2"), ("dotprod", "neon_dotprod"))  # fmt: skip
"""Prefixes of LLVM's feature names, each with the first `CPU_ISA` that includes the feature. The first prefix that
matches counts.

Every aarch64 CPU has NEON, so code always uses it.
"""


def cpu_has(*features: str) -> bool:
    """Return whether the CPU and the operating system have all these features, given by LLVM's names, and
    `SMOE_MAX_CPU_ISA` allows them."""
    if max_cpu_isa() == "none" or not is_available():
        return False
    found = _features()
    return all(found.get(feature, False) for feature in features)


@functools.cache
def _host_features() -> dict[str, bool]:
    """Return whether this CPU has each feature, by LLVM's names. The dictionary is empty without LLVM."""
    if not machine_code.is_known():
        return compiler.features_here(llvm())
    if not llvmlite_version():
        return {}
    key = object_cache.key_of(llvmlite_version(), "features")
    known = object_cache.CODE.read(key)
    if known is None:
        found = compiler.features_here(llvm()) if _is_loaded() else compiler.host_features()
        if found:  # an empty result means a broken llvmlite, which may be repaired
            object_cache.CODE.write(key, json.dumps(found).encode())
        return found
    stored: dict[str, bool] = json.loads(known)
    return stored


def _features() -> dict[str, bool]:
    """Return whether the CPU has each feature, by LLVM's names. Features above the limit `SMOE_MAX_CPU_ISA` count as
    missing."""
    found, most = dict(_host_features()), CPU_ISA.index(max_cpu_isa())
    for feature in found:
        first = next((isa for begins, isa in _FIRST_ISA if feature.startswith(begins)), "none")
        if CPU_ISA.index(first) > most:
            found[feature] = False
    return found


def _flattened(features: Mapping[str, bool]) -> str:
    """Return CPU features in the textual form that LLVM reads."""
    return ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(features.items()))


def compile_functions(source: Source, signatures: Mapping[str, Sequence[type]]) -> list[Callable[..., None]]:
    """Compile the LLVM text of `source` and return its functions, those named in `signatures`. They return nothing, and
    calls of them release the interpreter lock.

    Compiling takes 50 ms to 1 s, loading from the user's cache 2 ms. Raises `RuntimeError` with LLVM's message if the
    text is invalid.
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


def compile_ahead(sources: Iterable[Source]) -> None:
    """Begin to compile, in another process, those of the sources that are not in the user's cache. The arguments of the
    sources must be picklable. Without effect on systems where smoe cannot load object code itself."""
    if not machine_code.is_known() or not is_available():
        return
    features = _flattened(_features())
    keys = {object_cache.key_of(llvmlite_version(), features, source.key): source for source in sources}
    missing = {key: source for key, source in keys.items() if not _is_here_or_coming(key)}
    if missing and (begun := compiling_ahead.begin(missing, features)) is not None:
        _ahead.append(begun)


def _is_here_or_coming(key: bytes) -> bool:
    """Return whether the object file of a key is in the cache, or is being compiled by another process."""
    return any(key in each for each in _ahead) or object_cache.CODE.read(key) is not None


def _image(source: Source, features: str) -> machine_code.Image:
    """Return the linked code of a module: from the cache, or compiled and stored in the cache."""
    key = object_cache.key_of(llvmlite_version(), features, source.key)
    known = object_cache.CODE.read(key)
    if known is None:
        known = next((each.result(key) for each in _ahead if key in each), None)
    if known is not None:
        return machine_code.linked(known)
    text = source.text()
    made = compiler.object_file(llvm(), text, features) if _is_loaded() else compiler.compiled(text, features)
    object_cache.CODE.write(key, made)
    return machine_code.linked(made)


def _compiled_here(source: str, features: str, names: Sequence[str]) -> list[int]:
    module, machine = compiler.parsed(llvm(), source, features)
    engine = llvm().create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _kept.append(engine)
    return [engine.get_function_address(name) for name in names]


def address_of(function: Callable[..., None]) -> int:
    """Return the address of a compiled function, for calls from other machine code."""
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None, "only compiled functions have an address"
    return address
