"""The C library's heap, in processes of their own. Would catch arenas of which there is one for each thread, and freed
memory that stays with the process."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import smoe
from smoe.machine.native_heap import MOST_ARENAS

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

COUNTED = """
import ctypes, threading
from smoe.machine.native_heap import bound_heap
print(bound_heap())
all_hold = threading.Barrier(12)
def hold():
    block = bytearray(100_000)
    all_hold.wait()
threads = [threading.Thread(target=hold) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library = ctypes.CDLL(None)
library.fopen.restype = ctypes.c_void_p
file = library.fopen(b"/dev/stdout", b"w")
library.malloc_info(0, ctypes.c_void_p(file))
library.fflush(ctypes.c_void_p(file))
"""
GIVEN_BACK = """
from pathlib import Path
from smoe.machine.native_heap import give_back_heap
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
blocks = [bytearray(b"x" * 60_000) for _ in range(2000)]
last = bytearray(60_000)
del blocks
before = resident()
give_back_heap()
print(before - resident())
"""


def said(program: str, **environment: str) -> str:
    path = str(Path(smoe.__file__).parent.parent)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{program}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_many_threads_share_few_arenas() -> None:
    shown = said(COUNTED)
    assert shown.endswith("True\n")
    assert 1 <= shown.count("<heap nr=") <= MOST_ARENAS


def test_what_the_user_chooses_holds() -> None:
    assert said(COUNTED, MALLOC_ARENA_MAX="1").endswith("False\n")


def test_free_memory_is_given_back() -> None:
    assert int(said(GIVEN_BACK)) > 20 << 20
