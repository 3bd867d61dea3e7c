"""Machine code of aarch64, run on this machine by qemu: a program of nothing but kernels, made here byte by byte.

    file     | ELF header | code and constants | data |       no linker, no library, one system call after the other
    memory                  CODE                 DATA
    data     | calls | how many bytes | what was placed ... | (function, seven arguments) ... 0 |

The program makes the calls that it was told, writes all its data to its output, and ends. What was placed at an address
before it ran is then found at the same one, as the kernels left it.
"""

from __future__ import annotations

import functools
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe.kernels import compiler, jit, machine_code
from smoe.kernels.isa import NEON, NEON_DOTPROD

TRIPLE = "aarch64-unknown-linux-gnu"
CPUS = {NEON: "cortex-a53", NEON_DOTPROD: "neoverse-n1"}
"""Of each instruction set one that has no more: what else an instruction asks for ends the program."""
CODE, DATA = 0x400000, 0x10000000
_ALIGNMENT = 1 << 16
"""Of what lies in the file as it does in memory: the largest page that a system may have."""
_ARGUMENTS = 7
_SVC, _RET = 0xD4000001, 0xD65F03C0
_WRITE, _EXIT, _EXIT_ALL, _CLONE = 64, 93, 94, 220
_THREAD = 0x50F00
"""Of a thread that shares all there is."""


def _number(register: int, value: int) -> int:
    """movz: 16 bits, or those above 16 that are zero."""
    upper, value = (1, value >> 16) if value > 0xFFFF else (0, value)
    return 0xD2800000 | upper << 21 | value << 5 | register


def _load(register: int, base: int, offset: int) -> int:
    return 0xF9400000 | offset // 8 << 10 | base << 5 | register


def _pair(register: int, base: int, offset: int) -> int:
    return 0xA9400000 | offset // 8 << 15 | register + 1 << 10 | base << 5 | register


def _move(to: int, register: int) -> int:
    return 0xAA0003E0 | register << 16 | to


def _call(register: int) -> int:
    return 0xD63F0000 | register << 5


_START = [
    _number(19, DATA),
    _load(19, 19, 0),
    _load(9, 19, 0),  # a call
    0xB4000000 | 8 << 5 | 9,  # none: 8 instructions on
    _pair(0, 19, 8),
    _pair(2, 19, 24),
    _pair(4, 19, 40),
    _load(6, 19, 56),
    0x91000000 | 64 << 10 | 19 << 5 | 19,  # the next call
    _call(9),
    0x14000000 | -8 & 0x3FFFFFF,
    *(_number(1, DATA), _load(2, 1, 8), _number(0, 1), _number(8, _WRITE), _SVC),
    *(_number(0, 0), _number(8, _EXIT_ALL), _SVC),
]
"""Every call, one after the other, then the data into the output."""
_SPAWN = [
    *(_move(9, 0), _move(10, 1), _move(1, 2)),
    *(_number(0, _THREAD & 0xFFFF), 0xF2A00000 | _THREAD >> 16 << 5),
    *(_number(2, 0), _number(3, 0), _number(4, 0), _number(8, _CLONE), _SVC),
    0xB5000000 | 6 << 5,  # not the new one: 6 instructions on
    *(_move(0, 10), _call(9), _number(0, 0), _number(8, _EXIT), _SVC),
    _RET,
]
"""`spawn(function, argument, end of a stack)`: a thread that calls the function and ends."""
_BEGIN, SPAWN = "_start", "spawn"


def why_not() -> str | None:
    """What is missing here to run such programs."""
    if shutil.which("qemu-aarch64") is None:
        return "needs qemu-aarch64"
    if jit.llvm() is None:
        return "needs llvmlite"
    try:
        compiler.object_file(jit.llvm(), "define void @f() {\n  ret void\n}\n", "", TRIPLE)
    except RuntimeError:
        return "needs an LLVM that knows aarch64"
    return None


@functools.lru_cache(maxsize=2)
def image_of(source: str, *needs: str) -> machine_code.Image:
    """A module of kernels, made for a CPU that has these features and nothing else; behind them where it begins."""
    made = machine_code.linked(compiler.object_file(jit.llvm(), source, ",".join(f"+{each}" for each in needs), TRIPLE))
    begin = -(-len(made.data) // 4) * 4
    own = struct.pack(f"<{len(_START)}I{len(_SPAWN)}I", *_START, *_SPAWN)
    places = {_BEGIN: begin, SPAWN: begin + 4 * len(_START)}
    return machine_code.Image(made.data.ljust(begin, b"\0") + own, made.functions | places)


class Program:
    """Calls of the kernels of one module, made when all are known."""

    def __init__(self, image: machine_code.Image) -> None:
        self._image = image
        self._data = bytearray(64)
        self._calls: list[int] = []

    @property
    def size(self) -> int:
        """Bytes that have been placed: where the next will be."""
        return len(self._data)

    def place(self, numbers: npt.NDArray[Any]) -> int:
        """Copy an array to where the program will have it; at the beginning of a cache line."""
        address = DATA + len(self._data)
        data = numbers.tobytes()
        self._data += data + bytes(-len(data) % 64)
        return address

    def call(self, name: str, *arguments: int) -> None:
        padded = [*arguments, *[0] * (_ARGUMENTS - len(arguments))]
        self._calls += [CODE + self._image.functions[name], *padded]

    def address_of(self, name: str) -> int:
        return CODE + self._image.functions[name]

    def run(self, folder: Path, cpu: str) -> Results:
        calls = self.place(np.array([*self._calls, 0], np.int64))
        struct.pack_into("<QQ", self._data, 0, calls, len(self._data))
        file = folder / "program"
        file.write_bytes(_executable(self._image, bytes(self._data)))
        file.chmod(0o700)
        done = subprocess.run(["qemu-aarch64", "-cpu", cpu, str(file)], capture_output=True, timeout=120)
        assert done.returncode == 0, (done.returncode, done.stderr.decode(errors="replace"))
        assert len(done.stdout) == len(self._data)
        return Results(done.stdout)


class Results:
    """All data of a program that has run."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def at(self, address: int, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        numbers = np.frombuffer(self._data, dtype, int(np.prod(shape)), address - DATA)
        return numbers.reshape(shape)


def _executable(image: machine_code.Image, data: bytes) -> bytes:
    """An ELF file with code that can be run and data that can be written to."""
    code_at = _ALIGNMENT
    data_at = code_at + -(-len(image.data) // _ALIGNMENT) * _ALIGNMENT
    begin, magic = CODE + image.functions[_BEGIN], b"\x7fELF\x02\x01\x01"
    header = struct.pack("<16sHHIQQQIHHHHHH", magic, 2, 183, 1, begin, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    segments = [(5, code_at, CODE, len(image.data)), (6, data_at, DATA, len(data))]
    for flags, at, address, nbytes in segments:
        header += struct.pack("<IIQQQQQQ", 1, flags, at, address, address, nbytes, nbytes, _ALIGNMENT)
    return header.ljust(code_at, b"\0") + image.data.ljust(data_at - code_at, b"\0") + data
