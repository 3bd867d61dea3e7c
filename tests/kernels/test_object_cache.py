"""Object code in the user's cache, against code that is compiled, and what must never be taken from it.

Would catch a second start that loads LLVM or generates a kernel's source, code of another CPU, version or kernel, bytes
that were damaged or that another user may have written, and a folder that grows without end.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from smoe.kernels import compiler, jit, machine_code, object_cache, own_order
from smoe.kernels.isa import widest
from smoe.safe_path import WORKING_FOLDER, child_environment, code_line
from smoe.user_cache import PLACE

pytestmark = [
    pytest.mark.skipif(not machine_code.is_known(), reason="code is brought into a process on Linux only"),
    pytest.mark.usefixtures("own_cache"),
]
CONTENT = b"as it was written"
ADDS = """
define void @f(ptr %x) {{
  %v = load i64, ptr %x
  %s = add i64 %v, {added}
  store i64 %s, ptr %x
  ret void
}}
"""
COMPILES = """
import sys
from smoe.kernels import jit, own_order
from smoe.kernels.isa import widest
isa = widest()
jit.compile_functions(jit.Source(own_order.module_of, (isa,)), {own_order.products_name(1): ()})
print("libllvmlite" in open("/proc/self/maps").read(), isa.name)
"""


def adds(added: int) -> str:
    return ADDS.format(added=added)


def never(added: int) -> str:
    raise AssertionError("the source is generated though the object code is known")


def result_of(source: jit.Source) -> int:
    """Of its `f` on 5."""
    (function,) = jit.compile_functions(source, {"f": (ctypes.c_void_p,)})
    number = ctypes.c_int64(5)
    function(ctypes.addressof(number))
    return number.value


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the object code of other tests is known."""
    monkeypatch.setenv(PLACE, str(tmp_path / "cache"))


@pytest.fixture
def entry(own_cache: None) -> Iterator[Path]:
    """The file of the key `b"key"`."""
    object_cache.CODE.write(b"key", CONTENT)
    assert object_cache.CODE.read(b"key") == CONTENT
    (path,) = object_cache.CODE.folder.iterdir()
    return path


def test_a_second_process_loads_no_compiler(tmp_path: Path) -> None:
    if widest() is None:
        pytest.skip("needs llvmlite and AVX2")

    def start() -> str:
        line = code_line(COMPILES)
        return subprocess.run(
            line, env=child_environment(), cwd=WORKING_FOLDER, capture_output=True, check=True, text=True
        ).stdout

    first, second = start(), start()
    assert first == second == f"False {widest().name}\n"  # type: ignore[union-attr]
    assert len([*object_cache.CODE.folder.iterdir()]) >= 1


def test_code_of_the_cache_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jit.llvm() is not None
    first = result_of(jit.Source(adds, (7,)))
    monkeypatch.setattr(compiler, "object_file", never)
    monkeypatch.setattr(compiler, "compiled", never)
    assert first == result_of(jit.Source(adds, (7,))) == 12


def test_a_source_is_not_generated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert result_of(jit.Source(adds, (7,))) == 12
    monkeypatch.setattr(never, "__qualname__", adds.__qualname__)
    assert result_of(jit.Source(never, (7,))) == 12


def test_functions_within_others_are_told_apart_by_their_text() -> None:
    assert [result_of(jit.Source(lambda n=n: adds(n))) for n in (7, 9)] == [12, 14]  # type: ignore[misc]


@pytest.mark.parametrize("changed", ["arguments", "features", "LLVM", "generators", "CPU"])
def test_what_code_depends_on_is_part_of_its_key(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of before are left, and not taken."""
    assert result_of(jit.Source(adds, (7,))) == 12
    before = set(object_cache.CODE.folder.iterdir())
    if changed == "features":
        monkeypatch.setattr(jit, "_flattened", lambda features: "")
    elif changed == "LLVM":
        monkeypatch.setattr(jit, "llvmlite_version", lambda: "0.1")
    elif changed == "generators":
        monkeypatch.setattr(object_cache, "source_digest", lambda: "another")
    elif changed == "CPU":
        monkeypatch.setattr(object_cache, "_processor", lambda: "another")
    result_of(jit.Source(adds, (8 if changed == "arguments" else 7,)))
    assert before < set(object_cache.CODE.folder.iterdir())


def test_the_digest_covers_every_generator() -> None:
    names = {path.name for path in Path(own_order.__file__).parent.glob("*.py")}
    assert {"own_order.py", "builder.py", "compiler.py", "quantised.py"} <= names
    assert len(object_cache.source_digest()) == 64


def test_the_processor_is_named() -> None:
    if not object_cache._CPUINFO.exists():
        pytest.skip("the system does not say what its processor is")
    found = object_cache._processor()
    assert "flags" in found or "Features" in found
    assert "MHz" not in found, "it changes"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
        lambda data: b"\x7fELF" + data[4:],
    ],
    ids=["empty", "cut short", "longer", "content", "magic", "digest", "foreign"],
)
def test_damaged_entries_are_ignored_and_replaced(damage: object, entry: Path) -> None:
    assert callable(damage)
    entry.write_bytes(damage(entry.read_bytes()))
    assert object_cache.CODE.read(b"key") is None
    object_cache.CODE.write(b"key", CONTENT)
    assert object_cache.CODE.read(b"key") == CONTENT


def test_an_entry_under_the_name_of_another_is_ignored(entry: Path) -> None:
    object_cache.CODE.write(b"other", b"of another kernel")
    (other,) = set(object_cache.CODE.folder.iterdir()) - {entry}
    entry.write_bytes(other.read_bytes())
    assert object_cache.CODE.read(b"key") is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666], ids=oct)
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_another_user_may_write_is_ignored(what: str, mode: int, entry: Path) -> None:
    changed = entry if what == "file" else entry.parent
    changed.chmod(mode | (0o100 if what == "folder" else 0))
    assert object_cache.CODE.read(b"key") is None
    if what == "folder":
        object_cache.CODE.write(b"other", CONTENT)
        assert [*entry.parent.iterdir()] == [entry], "nothing is written there either"


def test_what_belongs_to_another_user_is_ignored(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: entry.stat().st_uid + 1)
    assert object_cache.CODE.read(b"key") is None


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_ignored(kind: str, entry: Path, tmp_path: Path) -> None:
    aside = entry.rename(tmp_path / "aside")
    if kind == "link":
        entry.symlink_to(aside)
    elif kind == "pipe":
        os.mkfifo(entry)
    else:
        entry.mkdir()
    assert object_cache.CODE.read(b"key") is None


def test_entries_are_their_user_s_alone_whatever_the_umask(own_cache: None) -> None:
    before = os.umask(0)
    try:
        object_cache.CODE.write(b"key", CONTENT)
    finally:
        os.umask(before)
    (path,) = object_cache.CODE.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert object_cache.CODE.read(b"key") == CONTENT


def test_the_folder_is_bounded_and_keeps_what_was_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "CODE", object_cache.CODE._replace(most_bytes=600))  # four entries of 144 bytes
    for n in range(3):
        object_cache.CODE.write(b"%d" % n, b"x" * 100)
        os.utime(object_cache.CODE.path_of(b"%d" % n), ns=(n, n))
    assert object_cache.CODE.read(b"0") is not None
    for n in (3, 4):
        object_cache.CODE.write(b"%d" % n, b"x" * 100)
    assert [n for n in range(5) if object_cache.CODE.read(b"%d" % n) is not None] == [0, 2, 3, 4]


def test_where_nothing_can_be_written_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert result_of(jit.Source(adds, (7,))) == 12
