"""Machine code that another process has compiled: an object file (ELF) put together and made ready to call.

    object file    | .text | .rodata.cst16 | .rodata | symbols | relocations |
    memory         | .text | .rodata.cst16 | .rodata |          places relative to each other: it may lie anywhere

Only what our kernels are made of is known: code and constants that refer to each other by distance
(`relocations.py`). Whatever else a file asks for (a library's function, memory of its own to write to) is refused, by
name. A CPU of aarch64 must be informed that code is new: else it may run what it has read of that memory before.
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
"""For debuggers; nothing here is ever unwound."""
_UNDEFINED, _SPECIAL = 0, 0xFF00


class Image(NamedTuple):
    """Code and constants as they lie in memory, wherever that is."""

    data: bytes
    functions: dict[str, int]
    """Offset of each."""


class _Section(NamedTuple):
    name: str
    kind: int
    flags: int
    data: bytes
    target: int
    """Of relocations, the section that they change."""
    alignment: int


def is_known() -> bool:
    """Whether code can be brought into this process: x86-64 and aarch64 Linux, by the system's own calls."""
    if sys.platform != "linux" or sys.maxsize <= 1 << 32:
        return False
    return platform.machine() == "x86_64" or (FAMILY == AARCH64 and _flush() is not None)


@functools.cache
def _flush() -> Callable[[int, int], object] | None:
    """(begin, end) of code that is new; None where there is no way to inform it."""
    try:
        flush = getattr(ctypes.CDLL("libgcc_s.so.1"), "__clear_cache")
    except (OSError, AttributeError):
        return None
    flush.argtypes, flush.restype = (ctypes.c_void_p, ctypes.c_void_p), None
    return flush  # type: ignore[no-any-return]


def linked(file: bytes) -> Image:
    """An object file's code and constants one behind the other. Raises `RuntimeError` for what is not known."""
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
    """An image in memory that can be called, and no longer be written to, as long as this lives."""

    def __init__(self, image: Image) -> None:
        """Raises `OSError` where the system does not allow new code."""
        self._functions = image.functions
        self._memory = mmap.mmap(-1, max(1, len(image.data)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.write(image.data)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if protect(self._begin, len(self._memory), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), f"no machine code may be made here: {os.strerror(ctypes.get_errno())}")
        flush = _flush() if FAMILY == AARCH64 else None
        if flush is not None:
            flush(self._begin, self._begin + len(self._memory))

    def address_of(self, name: str) -> int:
        """Where a function begins; raises `KeyError` where there is none of that name."""
        return self._begin + self._functions[name]


def _sections(file: bytes) -> list[_Section]:
    magic, _, machine, _, _, _, at, _, _, _, _, size, count, names = _HEADER.unpack_from(file)
    if not magic.startswith(_MAGIC) or machine not in relocations.KINDS or size != _SECTION.size:
        raise ValueError("not ELF for x86-64 or aarch64")
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
        raise ValueError(f"the section {section.name} is neither code nor constants")
    return True


def _places(symbols: _Section, strings: bytes, begins: dict[int, int]) -> list[tuple[str, int | None]]:
    """(name, place in the image) of every symbol; None: it is not in it."""
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
            raise ValueError(f"it asks for {name or section.name} in a way ({kind & 0xFFFFFFFF}) that is not known")
        fill_in(data, begin + offset, place + addend)
