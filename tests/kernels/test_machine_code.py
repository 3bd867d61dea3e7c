"""Machine code that another process has compiled, against the same compiled here, and files that are none.

Would catch a constant that is looked for in the wrong place, another number in a kernel's result, code that can still
be written to, and an object file that asks for what is not there and is run nevertheless.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe.kernels import compiler, jit, machine_code, own_order, relocations
from smoe.kernels.isa import widest

pytestmark = [
    pytest.mark.skipif(not machine_code.is_known(), reason="code is brought into a process on x86-64 Linux only"),
    pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2"),
]
ARGUMENTS = (ctypes.c_void_p,) * 4 + (ctypes.c_longlong,) * 3
CALLS_OTHERS = """
declare double @sin(double)
define void @f(ptr %x) {
  %v = load double, ptr %x
  %s = call double @sin(double %v)
  store double %s, ptr %x
  ret void
}
"""
HAS_MEMORY = """
@count = global i64 7
define void @f(ptr %x) {
  %v = load i64, ptr @count
  store i64 %v, ptr %x
  ret void
}
"""

LOOKS_UP = """
@squares = internal constant [6 x i64] [i64 0, i64 1, i64 4, i64 9, i64 16, i64 25]
define internal i64 @square(i64 %n) noinline {
  %at = getelementptr [6 x i64], ptr @squares, i64 0, i64 %n
  %v = load i64, ptr %at
  ret i64 %v
}
define internal i64 @double(i64 %n) noinline {
  %v = add i64 %n, %n
  ret i64 %v
}
define void @f(ptr %x) {
  %n = load i64, ptr %x
  %s = call i64 @square(i64 %n)
  %d = call i64 @double(i64 %s)
  store i64 %d, ptr %x
  ret void
}
"""


def features() -> str:
    return jit._flattened(jit._features())


@pytest.fixture(scope="module")
def object_file() -> bytes:
    isa = widest()
    assert isa is not None
    return compiler.compiled(own_order.module_of(isa), features())


def test_it_computes_what_is_compiled_here(object_file: bytes) -> None:
    isa = widest()
    assert isa is not None
    loaded = machine_code.Loaded(machine_code.linked(object_file))
    names = [own_order.products_name(rows) for rows in (1, 2, 4)]
    here = jit.compile_functions(jit.Source(own_order.module_of, (isa,)), dict.fromkeys(names, ARGUMENTS))
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(48, 160, generator=generator).bfloat16()
    for rows, name, ours in zip((1, 2, 4), names, here, strict=True):
        x = torch.randn(rows, 160, generator=generator).bfloat16()
        outs = [torch.full((rows, 48), float("nan")).bfloat16() for _ in range(2)]
        for call, out in zip((ours, ctypes.CFUNCTYPE(None, *ARGUMENTS)(loaded.address_of(name))), outs, strict=True):
            pairs = [each[n].data_ptr() for n in range(rows) for each in (x, out)]
            words = (ctypes.c_int64 * len(pairs))(*pairs)
            given_x, given_out = (x.data_ptr(), out.data_ptr()) if rows == 1 else (ctypes.addressof(words), None)
            call(given_x, w.data_ptr(), given_out, None, 0, 48, 160)
        assert torch.equal(*outs) and not outs[0].isnan().any()


def test_constants_and_functions_of_its_own_are_found() -> None:
    loaded = machine_code.Loaded(machine_code.linked(compiler.compiled(LOOKS_UP, features())))
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loaded.address_of("f"))
    for n in range(6):
        number = ctypes.c_int64(n)
        function(ctypes.addressof(number))
        assert number.value == 2 * n * n


def test_code_can_be_run_and_not_written_to(object_file: bytes) -> None:
    loaded = machine_code.Loaded(machine_code.linked(object_file))
    address = loaded.address_of(own_order.products_name(1))
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[1] == "r-xp"
            return
    raise AssertionError("it is not there")


@pytest.mark.parametrize("source", [CALLS_OTHERS, HAS_MEMORY], ids=["a library's function", "memory of its own"])
def test_what_is_not_known_is_refused(source: str) -> None:
    with pytest.raises(RuntimeError, match="no object file"):
        machine_code.linked(compiler.compiled(source, features()))


@pytest.mark.parametrize(
    ("kind", "to", "said"),
    [(0x7FFF, 0, "unknown relocation"), (286, 12, "byte 12 of a page; its instruction reads 8 bytes")],
    ids=["kind", "place"],
)
def test_a_place_of_aarch64_that_cannot_be_told_is_refused(kind: int, to: int, said: str) -> None:
    """A kind that nobody has written down, and a load of 8 bytes from between two of them."""
    section = machine_code._Section(".rela.text", 4, 0, struct.pack("<QQq", 0, kind, 0), 1, 8)
    with pytest.raises(ValueError, match=said):
        machine_code._relocate(section, relocations.AARCH64, bytearray(4), 0, [("constants", to)])


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 10_000))
def test_a_file_cut_short_is_refused(length: int, object_file: bytes) -> None:
    with pytest.raises(RuntimeError, match="no object file"):
        machine_code.linked(object_file[: min(length, len(object_file) - 1)])


def test_what_llvm_says_is_passed_on() -> None:
    with pytest.raises(RuntimeError, match="expected"):
        compiler.compiled("define nonsense", features())


def test_the_other_process_knows_this_cpu() -> None:
    assert compiler.host_features() == jit._host_features()
