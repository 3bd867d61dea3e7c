"""Loads machine code from an object file (ELF) that another process has compiled.

    object file    | .text | .rodata.cst16 | .rodata | symbols | relocations |
    memory         | .text | .rodata.cst16 | .rodata |            addresses are relative, so it may be loaded anywhere

Only what our kernels contain is supported: code and constants that refer to each other by distance (`relocations.py`).
Other contents, such as library functions or writable data, raise an error that names them. On aarch64 the instruction
cache must be flushed before new code runs.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

from smoe.cpu_isa import AARCH64, FAMILY
from smoe.kernels import relocations

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_MAGIC = b"\x7fELF\x02\x01\x01"
_CONTENTS, _SYMBOLS, _RELOCATIONS, _EMPTY = 1, 2, 4, 8
_WRITABLE, _IN_MEMORY = 1, 2
_UNWINDING = ".eh_frame"
"""The section for debuggers and exceptions, which kernels do not need."""
_UNDEFINED, _SPECIAL = 0, 0xFF00


class Image(NamedTuple):
    """Linked code and constants, which may be loaded at any address."""

    data: bytes
    functions: dict[str, int]
    """The offset of each function, by name."""


class _Section(NamedTuple):
    name: str
    kind: int
    flags: int
    data: bytes
    target: int
    """For a section of relocations: the number of the section that they change."""
    alignment: int


def is_known() -> bool:
    """Return whether smoe can load object code into this process, which it can on x86-64 and aarch64 Linux."""
    if sys.platform != "linux" or sys.maxsize <= 1 << 32:
        return False
    return platform.machine() == "x86_64" or (FAMILY == AARCH64 and _flush() is not None)


@functools.cache
def _flush() -> Callable[[int, int], object] | None:
    """Return a function (begin, end) that flushes the instruction cache for a range of addresses, or None if there is
    none."""
    try:
        flush = getattr(ctypes.CDLL("libgcc_s.so.1"), "__clear_cache")
    except (OSError, AttributeError):
        return None
    flush.argtypes, flush.restype = (ctypes.c_void_p, ctypes.c_void_p), None
    return flush  # type: ignore[no-any-return]


def linked(file: bytes) -> Image:
    """Return the linked code and constants of an object file. Raise `RuntimeError` if the file has unsupported
    contents."""
    try:
        sections = _sections(file)
        kept = {n: each for n, each in enumerate(sections) if _is_kept(each)}
        begins, end = dict[int, int](), 0
        for n, each in kept.items():
            begins[n] = -(-end // each.alignment) * each.alignment
            end = begins[n] + len(each.data)
        data = bytearray(end)
        for n, each in kept.items():
            data[begins[n] : begins[n] + len(each.data)] = each.data
        names = next(n for n, each in enumerate(sections) if each.kind == _SYMBOLS)
        places = _places(sections[names], sections[sections[names].target].data, begins)
        for each in sections:
            if each.kind == _RELOCATIONS and each.target in begins:
                _relocate(each, _machine_of(file), data, begins[each.target], places)
    except (struct.error, IndexError, StopIteration, ValueError) as error:
        raise RuntimeError(f"no object file: {error}") from error
    return Image(bytes(data), {name: place for name, place in places if name and place is not None})


class Loaded:
    """The code of an image in executable, read-only memory. The memory is freed with this object."""

    def __init__(self, image: Image) -> None:
        """Load the image. Raise `OSError` if the system does not allow new machine code."""
        self._functions = image.functions
        self._memory = mmap.mmap(-1, max(1, len(image.data)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.write(image.data)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if protect(self._begin, len(self._memory), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(
                ctypes.get_errno(), f"the system does not allow new machine code: {os.strerror(ctypes.get_errno())}"
            )
        flush = _flush() if FAMILY == AARCH64 else None
        if flush is not None:
            flush(self._begin, self._begin + len(self._memory))

    def address_of(self, name: str) -> int:
        """Return the address of a function. Raise `KeyError` if the image has no function of that name."""
        return self._begin + self._functions[name]


def _sections(file: bytes) -> list[_Section]:
    magic, _, machine, _, _, _, at, _, _, _, _, size, count, names = _HEADER.unpack_from(file)
    if not magic.startswith(_MAGIC) or machine not in relocations.KINDS or size != _SECTION.size:
        raise ValueError("the compiled kernels are not an ELF file for x86-64 or aarch64")
    raw = [_SECTION.unpack_from(file, at + n * size) for n in range(count)]
    strings = _bytes_of(file, raw[names])
    return [
        _Section(
            _text(strings, each[0]),
            each[1],
            each[2],
            _bytes_of(file, each),
            each[7] if each[1] == _RELOCATIONS else each[6],
            max(1, each[8]),
        )
        for each in raw
    ]


def _bytes_of(file: bytes, section: tuple[int, ...]) -> bytes:
    kind, begin, nbytes = section[1], section[4], section[5]
    data = b"" if kind == _EMPTY else file[begin : begin + nbytes]
    if len(data) != nbytes and kind != _EMPTY:
        raise ValueError("cut short")
    return data


def _text(strings: bytes, begin: int) -> str:
    return strings[begin : strings.index(b"\0", begin)].decode()


def _is_kept(section: _Section) -> bool:
    if not section.flags & _IN_MEMORY or section.name == _UNWINDING:
        return False
    if section.flags & _WRITABLE or section.kind != _CONTENTS:
        raise ValueError(f"the section {section.name} of the compiled kernels is neither code nor constants")
    return True


def _places(symbols: _Section, strings: bytes, begins: dict[int, int]) -> list[tuple[str, int | None]]:
    """Return (name, offset in the image) for every symbol of an object file. The offset is None for symbols outside of
    the image."""
    found = list[tuple[str, int | None]]()
    for name, _, _, section, value, _ in _SYMBOL.iter_unpack(symbols.data):
        is_there = section != _UNDEFINED and section < _SPECIAL and section in begins
        found.append((_text(strings, name), begins[section] + value if is_there else None))
    return found


def _machine_of(file: bytes) -> int:
    machine: int = _HEADER.unpack_from(file)[2]
    return machine


def _relocate(
    section: _Section, machine: int, data: bytearray, begin: int, places: list[tuple[str, int | None]]
) -> None:
    for offset, kind, addend in _RELOCATION.iter_unpack(section.data):
        name, place = places[kind >> 32]
        fill_in = relocations.KINDS[machine].get(kind & 0xFFFFFFFF)
        if fill_in is None or place is None:
            raise ValueError(
                f"the compiled kernels contain an unknown relocation, number {kind & 0xFFFFFFFF}, for "
                f"{name or section.name}"
            )
        fill_in(data, begin + offset, place + addend)
