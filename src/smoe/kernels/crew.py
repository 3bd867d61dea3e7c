"""Several threads on the short computations of a layer, without waiting for each other to wake up.

Products of a few hundred microseconds are too short for the usual ways of sharing: waking a thread takes 50 to 100 us
on a virtual machine, and whoever cuts the work into equal halves waits for the half that began late. Here the caller
publishes its work in a shared block of memory and begins at once; units (of products: 256 outputs) are taken one by one
with an atomic counter, so a helper joins when it is there, and the end is never more than one unit away:

    caller   | publish | unit 0 | unit 1 | unit 3 | unit 5 | unit 7 | done
    helper   . . asleep . . . . | unit 2 | unit 4 | unit 6 |  spin, then sleep

Helpers look out for new work for a moment before they sleep, all in machine code, without the interpreter lock. The
bits do not depend on who computes a unit (`row_product.py`, `attention.py`).

    next       the first unit that nobody has taken; far beyond `units` while nothing may be taken
    units      of the published work
    finished   of these
    compute    the function that computes one: its address
    then what this function wants to know; of products, for each: x, matrix, out (addresses), outputs, K, its first unit
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence

import torch

from smoe.kernels.jit import address_of, compile_functions, cpu_has
from smoe.kernels.row_product import fits, source

Product = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""x [1, K], matrix [K, N], out [1, N]: out is to become x @ matrix."""

UNIT = 256
"""Outputs in a unit: 1 MB of weights at K = 2048, some 60 us. Of smaller ones too much that is fetched ahead is taken
by another thread."""
_MOST_PRODUCTS = 1024
_NEXT, _UNITS, _FINISHED, _COMPUTE, _HEADER = 0, 8, 9, 10, 16  # in words of 8 bytes; `next` has a cache line to itself
_FIELDS = 6
_CLOSED = 1 << 40
"""`next` while nothing may be taken: larger than any number of units."""
_SPIN_CYCLES = 20_000
"""How long a helper looks out for work before it sleeps: some 10 us. Longer takes from the readers what it gives us."""
_WAKING_WEIGHTS = 1 << 20
"""Fewer weights are multiplied before a sleeper would be awake."""
_CLOSING_SECONDS = 0.001
_PROOF_OUTPUTS = 1 << 16
"""A wrong order shows in about one output of 5000, so this many miss it once in half a million times."""


class Crew:
    """The calling thread and `threads - 1` helpers. Used by one thread at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._work, self._serve, self._product = _functions()
        self._block = (ctypes.c_int64 * (_HEADER + _MOST_PRODUCTS * _FIELDS))()
        self._address = ctypes.addressof(self._block)
        self._block[_NEXT] = _CLOSED
        self._is_closed = False
        self._is_asleep = [False] * (threads - 1)
        self._alarms = [threading.Lock() for _ in self._is_asleep]
        """Held, but for the moment between waking a helper and its waking up."""
        self._helpers = [
            threading.Thread(target=self._help, args=(n,), name=f"smoe-multiply-{n}", daemon=True)
            for n in range(threads - 1)
        ]
        for helper, alarm in zip(self._helpers, self._alarms, strict=True):
            alarm.acquire()
            helper.start()

    def multiply(self, products: Sequence[Product]) -> None:
        """Compute all products; every matrix must be one that `row_product.fits`, every x and out lie in one piece."""
        for begin in range(0, len(products), _MOST_PRODUCTS):
            self._multiply(products[begin : begin + _MOST_PRODUCTS])

    def share(self, compute: int, fields: Sequence[int], units: int, is_long: bool) -> None:
        """Have the function at the address `compute` called as `compute(fields, unit)` for every unit, by anybody.

        `is_long`: worth waking those who sleep.
        """
        block = self._block
        struct.pack_into(f"{len(fields)}q", block, 8 * _HEADER, *fields)
        block[_UNITS], block[_FINISHED], block[_COMPUTE] = units, 0, compute
        if is_long:
            self._wake()
        self._work(self._address)  # resets `next`: until then nobody takes anything

    def close(self) -> None:
        """End the helpers."""
        self._is_closed = True
        while any(helper.is_alive() for helper in self._helpers):
            self._wake()
            for helper in self._helpers:
                helper.join(_CLOSING_SECONDS)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _multiply(self, products: Sequence[Product]) -> None:
        fields: list[int] = []
        units = weights = 0
        for x, matrix, out in products:
            columns, rows = matrix.shape
            fields += (x.data_ptr(), matrix.data_ptr(), out.data_ptr(), rows, columns, units)
            units += -(-rows // UNIT)
            weights += rows * columns
        self.share(self._product, fields, units, is_long=weights >= _WAKING_WEIGHTS)

    def _wake(self) -> None:
        """Whoever falls asleep just now misses this work, which gets done without it."""
        for helper, is_asleep in enumerate(self._is_asleep):
            if is_asleep:
                self._is_asleep[helper] = False
                self._alarms[helper].release()

    def _help(self, number: int) -> None:
        while not self._is_closed:
            self._serve(self._address, _SPIN_CYCLES)
            self._is_asleep[number] = True
            self._alarms[number].acquire()


@functools.cache
def _functions() -> tuple[Callable[..., None], Callable[..., None], int]:
    """Machine code, made once a process; of what computes a unit of products, the address."""
    pointer, number = ctypes.c_void_p, ctypes.c_longlong
    signatures = {"work": (pointer,), "serve": (pointer, number), "product": (pointer, number)}
    work, serve, product = compile_functions(source() + _source(), signatures)
    return work, serve, address_of(product)


def is_supported() -> bool:
    """Whether this CPU has the kernel's instructions, and llvmlite is there to make it."""
    return cpu_has("avx512f", "avx512bf16")


def agrees(crew: Crew, matrix: torch.Tensor) -> bool:
    """Whether the kernel's bits are the library's on this matrix [K, N], on one thread and on all of them."""
    if not fits(matrix):
        return False
    columns, rows = matrix.shape
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    ours = torch.empty(1, rows, dtype=matrix.dtype)
    try:
        for _ in range(-(-_PROOF_OUTPUTS // rows)):
            x = torch.randn(1, columns, generator=generator).to(matrix.dtype)
            crew.multiply([(x, matrix, ours)])
            for count in {1, threads}:
                torch.set_num_threads(count)
                if not torch.equal(ours, x @ matrix):
                    return False
    finally:
        torch.set_num_threads(threads)
    return True


def _source() -> str:
    """`work(block)` opens the work, computes units while there are any, waits for the last one and closes the work.

    `serve(block, cycles)` helps until there has been nothing to do for so many cycles.
    `product(products, unit)` computes one unit of products.
    """

    def field(name: str, index: int) -> str:
        return f"  %{name} = getelementptr i64, ptr %block, i64 {index}"

    return f"""
declare void @llvm.x86.sse2.pause()
declare i64 @llvm.readcyclecounter()

define void @product(ptr %first.product, i64 %unit) {{
entry:
  br label %find
find:
  %product = phi ptr [%first.product, %entry], [%following, %further]
  %following = getelementptr i64, ptr %product, i64 {_FIELDS}
  %rows.at = getelementptr i64, ptr %product, i64 3
  %rows = load i64, ptr %rows.at
  %first.at = getelementptr i64, ptr %product, i64 5
  %first = load i64, ptr %first.at
  %nth = sub i64 %unit, %first
  %begin = mul i64 %nth, {UNIT}
  %inside = icmp slt i64 %begin, %rows
  br i1 %inside, label %compute, label %further
further:
  br label %find
compute:
  %x = load ptr, ptr %product
  %w.at = getelementptr i64, ptr %product, i64 1
  %w = load ptr, ptr %w.at
  %out.at = getelementptr i64, ptr %product, i64 2
  %out = load ptr, ptr %out.at
  %K.at = getelementptr i64, ptr %product, i64 4
  %K = load i64, ptr %K.at
  %full = add i64 %begin, {UNIT}
  %end = call i64 @llvm.smin.i64(i64 %full, i64 %rows)
  call void @row_product(ptr %x, ptr %w, ptr %out, i64 %begin, i64 %end, i64 %K)
  ret void
}}

define internal void @units(ptr %block) {{
entry:
{field("next", _NEXT)}
{field("units.at", _UNITS)}
{field("finished", _FINISHED)}
{field("compute.at", _COMPUTE)}
{field("fields", _HEADER)}
  br label %take
take:
  %unit = atomicrmw add ptr %next, i64 1 seq_cst
  %units = load atomic i64, ptr %units.at acquire, align 8
  %mine = icmp slt i64 %unit, %units
  br i1 %mine, label %compute, label %done
compute:
  %function = load ptr, ptr %compute.at
  call void %function(ptr %fields, i64 %unit)
  %before = atomicrmw add ptr %finished, i64 1 seq_cst
  br label %take
done:
  ret void
}}

define void @work(ptr %block) {{
entry:
{field("next", _NEXT)}
{field("units.at", _UNITS)}
{field("finished", _FINISHED)}
  store atomic i64 0, ptr %next seq_cst, align 8
  call void @units(ptr %block)
  %units = load i64, ptr %units.at
  br label %wait
wait:
  %so.far = load atomic i64, ptr %finished acquire, align 8
  %all = icmp eq i64 %so.far, %units
  br i1 %all, label %done, label %pause
pause:
  call void @llvm.x86.sse2.pause()
  br label %wait
done:
  store atomic i64 {_CLOSED}, ptr %next seq_cst, align 8
  ret void
}}

define void @serve(ptr %block, i64 %cycles) {{
entry:
{field("next", _NEXT)}
{field("units.at", _UNITS)}
  br label %rest
rest:
  %since = call i64 @llvm.readcyclecounter()
  br label %look
look:
  %unit = load atomic i64, ptr %next acquire, align 8
  %units = load atomic i64, ptr %units.at acquire, align 8
  %is.work = icmp slt i64 %unit, %units
  br i1 %is.work, label %help, label %pause
help:
  call void @units(ptr %block)
  br label %rest
pause:
  call void @llvm.x86.sse2.pause()
  %now = call i64 @llvm.readcyclecounter()
  %spent = sub i64 %now, %since
  %is.over = icmp sgt i64 %spent, %cycles
  br i1 %is.over, label %done, label %look
done:
  ret void
}}
"""
