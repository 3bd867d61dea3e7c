"""Kernels that another process compiles ahead.

Would catch a load that compiles again what is being compiled, one that waits for ever or fails where the other process
does, a source that is compiled although its code is in the cache, and a format that loading needs and nobody compiled.
"""

from __future__ import annotations

import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smoe.bounds import BF16, INT8
from smoe.formats.registry import FORMATS
from smoe.kernels import compiler, compiling_ahead, jit, machine_code, matrix, object_cache, quantised
from smoe.kernels.isa import widest
from smoe.load import resolve
from smoe.memory.dtypes import BF16 as BF16_WEIGHTS
from smoe.presets import configure
from smoe.user_cache import PLACE
from tests import gguf_toy, promised

pytestmark = pytest.mark.skipif(not machine_code.is_known(), reason="code is brought into a process on Linux only")


def never(*_: object, **__: object) -> bytes:
    raise AssertionError("this process compiles what another one has compiled")


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the cache nor an earlier test has object code."""
    monkeypatch.setenv(PLACE, str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_ahead", [])
    promised.needs(jit.is_available() and widest() is not None, promised.MACHINE_CODE)


def products(form: str) -> matrix.Products:
    """The machine code of a format's products with rows in 8 bits, linked anew."""
    isa = widest(INT8)
    assert isa is not None
    return matrix._compiled(FORMATS[form], isa, INT8)


def test_the_calling_process_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix.compile_ahead([FORMATS["Q4_0"], FORMATS["Q8_0"]], INT8)
    monkeypatch.setattr(compiler, "compiled", never)
    monkeypatch.setattr(compiler, "object_file", never)
    assert products("Q4_0").in_bytes and products("Q8_0").in_bytes
    assert all(begun.result(key) == object_cache.CODE.read(key) for key in keys() for begun in jit._ahead)
    monkeypatch.setattr(compiling_ahead, "begin", never)
    matrix.compile_ahead([FORMATS["Q4_0"]], INT8)
    monkeypatch.setattr(jit, "_ahead", [])
    matrix.compile_ahead([FORMATS["Q4_0"]], INT8)  # in the cache


def test_code_compiled_ahead_is_that_of_this_process() -> None:
    matrix.compile_ahead([FORMATS["Q4_0"]], INT8)
    (begun,), features = jit._ahead, jit._flattened(jit._features())
    for key, source in zip(keys(), sources(), strict=True):
        assert begun.result(key) == compiler.object_file(jit.llvm(), source.text(), features)


def sources() -> list[jit.Source]:
    """Those of one format."""
    isa, plain = widest(INT8), widest()
    assert isa is not None and plain is not None
    form = FORMATS["Q4_0"]
    return [matrix._source_of(form, isa, INT8), matrix._source_of(form, plain, BF16)]


def keys() -> list[bytes]:
    """The keys of `sources` in the cache."""
    features = jit._flattened(jit._features())
    return [object_cache.key_of(jit.llvmlite_version(), features, each.key) for each in sources()]


@pytest.mark.parametrize(
    "way", ["no process", "it ends at once", "its source is refused", "it does not answer", "it writes something else"]
)
def test_where_the_other_process_fails_this_one_compiles(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "no process":
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(OSError("no more processes")))
    elif way == "it ends at once":
        monkeypatch.setattr(compiling_ahead, "module_line", lambda module: ["false"])
    elif way == "it does not answer":
        monkeypatch.setattr(compiling_ahead, "module_line", lambda module: ["sleep", "5"])
        monkeypatch.setattr(compiling_ahead, "_SECONDS", 0.01)
    elif way == "it writes something else":
        monkeypatch.setattr(compiling_ahead, "module_line", lambda module: ["echo", "a line of another program's text"])
    else:
        broke = jit.Source(str, ("this is no LLVM text",))
        begun = compiling_ahead.begin(dict.fromkeys(keys(), broke), jit._flattened(jit._features()))
        assert begun is not None
        jit._ahead.append(begun)
    matrix.compile_ahead([FORMATS["Q4_0"]], INT8)
    monkeypatch.undo() if way == "no process" else None
    assert products("Q4_0").in_bytes


def test_loading_compiles_no_product_itself(
    tmp_path: Path, open_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of experts nor of other weights."""
    place = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M", head_dim=64)[0]
    compiled: list[jit.Source] = []
    real = jit.Source.text
    monkeypatch.setattr(jit.Source, "text", lambda self: compiled.append(self) or real(self))
    for function in (matrix.products_of, matrix.own_order):
        function.cache_clear()
    open_model(place, "full")
    found = {source.make for source in compiled}
    assert jit._ahead, "the test tests something"
    assert not {quantised.byte_module_of, quantised.module_of} & found


@pytest.mark.parametrize(("device", "computes_on"), [("cuda", "cuda"), ("emulated", "cpu")])
def test_nothing_is_compiled_for_another_device(device: str, computes_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a process that compiles kernels for a model that a GPU, or an emulated device, computes."""
    monkeypatch.setattr(matrix, "compile_ahead", never)
    spec: Any = types.SimpleNamespace(dense={}, dtype=BF16_WEIGHTS)
    resolve._compile_ahead(spec, configure(device=device), [], torch.device(computes_on))
    with pytest.raises(AssertionError):
        resolve._compile_ahead(spec, configure(device="cpu"), [], torch.device("cpu"))
