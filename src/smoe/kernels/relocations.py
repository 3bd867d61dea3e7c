"""Relocations of machine code: writes the distance of an address into the bits of an instruction.

An object file lists the places to change, each with its type (`R_X86_64_...`, `R_AARCH64_...`). Only relative types are
supported, so code and constants may be loaded at any multiple of 4096 bytes. aarch64 counts in units of 4096 bytes,
whatever the page size of the system.

    x86-64     PC32                   32 bits, relative to the place
    aarch64    ADR_..._PG_HI21        the distance in units of 4096 bytes
               ADD/LDSTn_..._LO12     the lowest 12 bits of the address, counted in elements
               CALL26, JUMP26         the distance in instructions
               PREL32                 the same as PC32
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

X86_64, AARCH64 = 62, 183
"""The numbers of the two processor families in ELF files."""
_PAGE_BITS = 12


def _distance(data: bytearray, at: int, to: int) -> None:
    struct.pack_into("<i", data, at, to - at)


def _filled_in(data: bytearray, at: int, bits: int) -> None:
    (word,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at, word | bits)


def _pages(data: bytearray, at: int, to: int) -> None:
    pages = (to >> _PAGE_BITS) - (at >> _PAGE_BITS)
    _filled_in(data, at, (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5)


def _within_page(size_bits: int) -> Callable[[bytearray, int, int], None]:
    """Return the function for a relocation that writes an address within 4096 bytes, in units of 2 ** size_bits
    bytes."""

    def fill_in(data: bytearray, at: int, to: int) -> None:
        place = to & (1 << _PAGE_BITS) - 1
        if place % (1 << size_bits):
            raise ValueError(
                f"a relocation points to byte {place} of a page; its instruction reads {1 << size_bits} bytes at a "
                "time and needs a multiple of that number"
            )
        _filled_in(data, at, place >> size_bits << 10)

    return fill_in


def _branch(data: bytearray, at: int, to: int) -> None:
    _filled_in(data, at, (to - at >> 2) & 0x3FFFFFF)


KINDS: Mapping[int, Mapping[int, Callable[[bytearray, int, int], None]]] = {
    X86_64: {2: _distance, 4: _distance},
    AARCH64: {
        261: _distance,
        275: _pages,
        277: _within_page(0),
        278: _within_page(0),
        282: _branch,
        283: _branch,
        284: _within_page(1),
        285: _within_page(2),
        286: _within_page(3),
        299: _within_page(4),
    },
}
"""For each machine, the functions that apply relocations, by type. They take (image, offset to change, target
offset)."""
