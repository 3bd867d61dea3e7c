"""Computes one token through the norm, attention and second norm of a decoder layer, as one job of a thread pool.

    norm | q, k, v | norm of heads, rotary, KV cache | attention | output | residual, norm | router, if it is supported

In machine code each part waits for the one before it, so Python runs once per layer instead of some forty times. The
parts are the kernels that replace the separate modules, so the bits are the same. Only the rotary embedding has a
kernel of its own here: elementwise arithmetic with a rounding after every operation.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from smoe.kernels import attention, norm, tasks
from smoe.kernels.byte_layout import Layout
from smoe.kernels.jit import Source, address_of, compile_functions
from smoe.kernels.matrix import Matrix
from smoe.kernels.quantised_work import LONE_UNIT
from smoe.kernels.spinning_pool import UNIT, WAKING_WEIGHTS, Ahead, SpinningPool
from smoe.kernels.token_router import TokenRouter

LANES = 16
_LINE = 64
_COUNTS = 14
"""The number of progress counters: one for each part, and one for every layout of rows in 8 bits."""
_MOST_LAYOUTS = 3
_NORMED = 1 << 50
"""A placeholder in tasks for the address of the row that the router takes."""


class Norm(NamedTuple):
    """One RMSNorm of a decoder layer, as the layer's job computes it."""

    at: Callable[[], int]
    """A function that returns the current address of the norm's weight in bf16."""
    size: int
    eps: float


class Projection(NamedTuple):
    """A linear layer, as arguments for a product of the thread pool."""

    matrix: Matrix
    """The matrix, with the address that it has at first."""
    at: Callable[[], int]
    """A function that returns the current address of the matrix."""
    nbytes: int
    bias: Callable[[], int] | None = None
    """A function that returns the current address of the bias in bf16; None without a bias."""
    part: int = 0
    """The `Product.part` of the product, for bf16 matrices in torch's order."""

    @property
    def outputs(self) -> int:
        return self.matrix.outputs

    @property
    def columns(self) -> int:
        return self.matrix.columns


class Parts(NamedTuple):
    """The modules of a decoder layer that a job computes for one token, and the shape of the layer's heads."""

    norm: Norm
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    last_norm: Norm
    q_norm: Norm | None
    """The norm of every query head, before the rotary embedding; None if heads have no norm."""
    k_norm: Norm | None
    heads: int
    key_heads: int
    size: int
    """The number of elements per head."""
    rotary: int
    """The number of elements of a head, from the first on, that the rotary embedding rotates."""
    scale: float


class AttachedRouter(NamedTuple):
    """The router that follows a layer's attention and that the attention's job computes as well."""

    projection: Projection
    """The product of the router, whose weights are in bf16."""
    router: TokenRouter


class Place(NamedTuple):
    """The storage of a token's keys and values in the KV cache."""

    keys: torch.Tensor
    """The storage of keys [1, key heads, capacity, size]. That of values has the same shape."""
    values: torch.Tensor
    begin: int
    """The index of the text's first position."""
    end: int
    """The index of the token's position."""


def fits(parts: Parts) -> bool:
    """Return whether the kernels support the shapes of a decoder layer: those of its norms, projections, heads and
    rotary embedding."""
    hidden, half = parts.norm.size, parts.rotary // 2
    return (
        norm.fits(hidden)
        and norm.fits(parts.size)
        and 0 < parts.rotary <= parts.size
        and parts.rotary % 2 == 0
        and half % LANES == 0
        and parts.heads % parts.key_heads == 0
        and all(each is None or each.size == parts.size for each in (parts.q_norm, parts.k_norm))
        and parts.q.outputs == parts.heads * parts.size == parts.o.columns
        and parts.k.outputs == parts.v.outputs == parts.key_heads * parts.size
        and parts.last_norm.size == hidden
        and parts.q.columns == parts.k.columns == parts.v.columns == parts.o.outputs == hidden
    )


class TokenAttention:
    """The attention, both norms and optionally the router of one decoder layer, computed for one token as one job of
    the thread pool. Layers that compute one after the other may share a `Scratch`."""

    def __init__(self, pool: SpinningPool, parts: Parts, scratch: Scratch) -> None:
        self._pool = pool
        self.parts = parts
        self._scratch = scratch
        self._arguments = _Arguments(pool, parts)
        self._following: TokenAttention | None = None
        self._weights = Ahead.of([])
        self._routing: AttachedRouter | None = None
        self._known: tuple[int, ...] = ()
        """The addresses of weights and memory for which `_tasks` was made."""
        self._tasks, self._units = (ctypes.c_int64 * 0)(), 0
        self._routed_fields: list[int] = []
        """The indices of the task fields that contain the address of the router's row."""
        self._lists = (ctypes.c_int64 * (3 * 4))()
        """For each product in 8 bits a list of one row: the address of the row, and that of its product."""
        projections = parts.q, parts.k, parts.v, parts.o
        norms = parts.norm, parts.last_norm, parts.q_norm, parts.k_norm
        self._places = [each.at for each in (*projections, *norms) if each is not None]
        self._places += [each.bias for each in projections if each.bias is not None]
        self._is_long = sum(each.outputs * each.columns for each in projections) >= WAKING_WEIGHTS

    def fetch_for(self, following: TokenAttention) -> None:
        """Prefetch the weights of `following`, the job that comes after this layer's experts."""
        self._following = following

    def route_by(self, routing: AttachedRouter) -> None:
        """Make the router's product and choice of experts part of the layer's job."""
        self._routing, self._known = routing, ()
        self._places.append(routing.projection.at)

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, place: Place
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states after attention, and their norm, for `hidden` [1, 1, H]. cos and sin are [1, 1,
        rotary]."""
        after, normed = torch.empty_like(hidden), torch.empty_like(hidden)
        known = self._scratch.address, *[at() for at in self._places]
        if known != self._known:
            self._make_tasks()
            self._known = known
        if self._following is not None:
            self._pool.fetch_ahead(self._following._weights)
        self._arguments.set(hidden, cos, sin, place, after, normed)
        fields = self._tasks
        for place_of_row in self._routed_fields:
            fields[place_of_row] = normed.data_ptr()
        self._pool.run_packed(ctypes.addressof(fields), ctypes.sizeof(fields), self._units, self._is_long, _COUNTS)
        return after, normed

    def _make_tasks(self) -> None:
        parts, at, add = self.parts, self._scratch.places(self.parts), _Tasks(self._pool, self._lists)
        self._arguments.fill(at)
        projections = parts.q, parts.k, parts.v, parts.o
        matrices = [each.matrix._replace(address=each.at()) for each in projections]
        self._weights = Ahead.of([(each.at(), each.nbytes) for each in projections])
        head_units = parts.heads // self._arguments.group
        normed = add.call(self._arguments.norm, 1, add.at_once)
        heads = add.products(at.normed, matrices[:3], (parts.q, parts.k, parts.v), (at.q, at.k, at.v), at, normed)
        turned = add.call(self._arguments.heads, parts.key_heads, heads)
        attended = add.call(self._arguments.attention, head_units, turned)
        output = add.products(at.attended, matrices[3:], (parts.o,), (at.output,), at, attended)
        last = add.call(self._arguments.last, 1, output)
        if self._routing is not None:
            product, router = self._routing
            matrix = product.matrix._replace(address=product.at())
            logits = add.products(_NORMED, [matrix], (product,), (router.logits_at,), at, last)
            add.call((router.function, router.arguments), 1, logits)
        self._tasks, self._units = (ctypes.c_int64 * len(add.fields))(*add.fields), add.units
        self._routed_fields = [n for n, value in enumerate(add.fields) if value == _NORMED]


class _Places(NamedTuple):
    """The addresses of the intermediate values of a layer's job, which one task writes and a later task reads."""

    normed: int
    q: int
    k: int
    v: int
    attended: int
    output: int
    sums: int
    in_bytes: int
    """The address of the row to multiply, rounded to 8 bits in every layout."""


class Scratch:
    """Memory for the intermediate values of a layer's job. One layer at a time uses it."""

    def __init__(self) -> None:
        self._memory = bytearray()
        self.address = 0

    def reserve(self, parts: Parts) -> None:
        """Provide enough memory for the job of a decoder layer with the modules `parts`."""
        need = sum(_sizes(parts)) + _LINE
        if need > len(self._memory):
            self._memory = bytearray(need)
            start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self.address = -(-start // _LINE) * _LINE

    def places(self, parts: Parts) -> _Places:
        """Return the addresses of the intermediate values for a layer with the modules `parts`. The values are one
        after the other in memory."""
        found, at = [], self.address
        for size in _sizes(parts):
            found.append(at)
            at += size
        return _Places(*found)


def _sizes(parts: Parts) -> list[int]:
    """Return the size in bytes of each intermediate value in `_Places`, rounded up to cache lines."""
    hidden, heads = parts.o.outputs, parts.heads * parts.size
    rows = _MOST_LAYOUTS * 4 * max(hidden, heads)  # a layout's row has some 1.3 bytes per element
    sizes = [2 * each for each in (hidden, heads, parts.k.outputs, parts.v.outputs, heads, hidden)]
    return [-(-size // _LINE) * _LINE for size in (*sizes, 8 * parts.heads, rows)]


class _Tasks:
    """The tasks of a layer's job, in order. A task that depends on others waits for (address of a progress counter,
    number of finished units)."""

    def __init__(self, pool: SpinningPool, lists: ctypes.Array[ctypes.c_int64]) -> None:
        self.fields: list[int] = []
        self.units = 0
        self.at_once = pool.at_once, 0
        self._pool = pool
        self._lists, self._listed = lists, 0
        self._words = 0

    def _word(self) -> int:
        self._words += 1
        assert self._words <= _COUNTS, "more parts than words that count them"
        return self._pool.word(tasks.PROGRESS + self._words - 1)

    def call(self, function: tuple[int, int], units: int, wait: tuple[int, int]) -> tuple[int, int]:
        """Add a task that calls a function(arguments, unit) for `units` units. It begins when `wait` is reached. Return
        the (counter address, units) for which a task that needs the results must wait."""
        done = self._word()
        self.fields += (self.units, units, 1, tasks.CALL, *wait, done, *function, 0, 0, 0, 0)
        self.units += units
        return done, units

    def products(
        self,
        x: int,
        matrices: Sequence[Matrix],
        projections: Sequence[Projection],
        outs: Sequence[int],
        at: _Places,
        wait: tuple[int, int],
    ) -> tuple[int, int]:
        """Add tasks that multiply the row at the address `x` with matrices. They begin when `wait` is reached. Return
        the (counter address, units) for which a task that needs the products must wait."""
        done, rows = self._word(), self._rows_in_bytes(x, matrices, at.in_bytes, wait)
        before = self.units
        outputs = sum(each.outputs for each in matrices)
        for matrix, projection, out in zip(matrices, projections, outs, strict=True):
            bias = 0 if projection.bias is None else projection.bias()
            self._product(matrix, projection.part, x, out, bias, rows, outputs, len(matrices) > 1, wait, done)
        return done, self.units - before

    def _rows_in_bytes(
        self, x: int, matrices: Sequence[Matrix], at: int, wait: tuple[int, int]
    ) -> dict[Layout, tuple[int, tuple[int, int]]]:
        """Add tasks that round the row at the address `x` to 8 bits, in every layout that the matrices need. Return by
        layout the address of the rounded row and the (counter address, units) for which its readers must wait."""
        found: dict[Layout, tuple[int, tuple[int, int]]] = {}
        for matrix in matrices:
            functions = None if matrix.products is None else matrix.products.in_bytes
            if functions is None or functions.layout in found:
                continue
            done = self._word()
            self.fields += (self.units, 1, 1, tasks.FORMAT, *wait, done, functions.rows, x, 0, at, matrix.columns, 0)
            self.units += 1
            found[functions.layout] = at, (done, 1)
            at += -(-functions.layout.nbytes(matrix.columns) // _LINE) * _LINE
        return found

    def _product(
        self,
        matrix: Matrix,
        part: int,
        x: int,
        out: int,
        bias: int,
        rows: dict[Layout, tuple[int, tuple[int, int]]],
        outputs_of_all: int,
        are_several: bool,
        wait: tuple[int, int],
        done: int,
    ) -> None:
        address, outputs, columns, products = matrix
        products, unit = products or self._pool.own_order, UNIT if are_several else LONE_UNIT
        if products is None:
            kind, arguments = tasks.PRODUCT, (x, address, out, bias, columns, part or columns)
        elif products.in_bytes is None:
            kind, arguments = tasks.FORMAT, (products.of_rows[0], x, address, out, columns, bias)
        else:
            at, wait = rows[products.in_bytes.layout]
            unit = self._pool.byte_unit(outputs_of_all)
            listed = self._list(at, out)
            kind, arguments = tasks.FORMAT, (products.in_bytes.products, listed, address, 0, columns, bias)
        self.fields += (self.units, outputs, unit, kind, *wait, done, *arguments)
        self.units += -(-outputs // unit)

    def _list(self, x: int, out: int) -> int:
        """Store a list that contains one 8-bit activation row, and return the address of the list."""
        first = 3 * self._listed
        self._lists[first : first + 3] = [1, x, out]
        self._listed += 1
        return ctypes.addressof(self._lists) + 8 * first


NORM = ("x", "weight", "out", "size", "eps")
HEADS = ("cos", "sin", "key_place", "value_place", "key_head", "value_head", "q", "k", "v", "q_weight", "k_weight",
          "q_eps", "k_eps", "size", "rotary", "group")  # fmt: skip
LAST = ("x", "after", "normed", "added", "weight", "size", "eps")
PROMPT_HEADS = (*HEADS, "key_heads", "tokens", "step", "key_row", "value_row")
"""The arguments of each function, as words of 8 bytes: addresses, numbers, and the bits of float32 numbers."""


class _Arguments:
    """The argument words of each function of the job. Some of them differ from token to token."""

    def __init__(self, pool: SpinningPool, parts: Parts) -> None:
        self._parts = parts
        shared = parts.heads // parts.key_heads
        self.group = attention.group_of(shared, parts.heads, pool.threads)
        attend, self._exp = attention.functions()
        functions = (*functions_of_layers()[:3], attend)
        self._words = [(ctypes.c_int64 * count)() for count in (len(NORM), len(HEADS), len(LAST), 16)]
        pairs = [(function, ctypes.addressof(words)) for function, words in zip(functions, self._words, strict=True)]
        self.norm, self.heads, self.last, self.attention = pairs

    def fill(self, at: _Places) -> None:
        """Write the arguments of all functions that are the same for every token. `at`: the addresses of the
        intermediate values."""
        parts, (of_norm, of_heads, of_last, of_attention) = self._parts, self._words
        hidden, size = parts.o.outputs, parts.size
        of_norm[1:] = [parts.norm.at(), at.normed, hidden, bits_of(parts.norm.eps)]
        weights = [0 if each is None else each.at() for each in (parts.q_norm, parts.k_norm)]
        epsilons = [0 if each is None else bits_of(each.eps) for each in (parts.q_norm, parts.k_norm)]
        shared = parts.heads // parts.key_heads
        of_heads[6:] = [at.q, at.k, at.v, *weights, *epsilons, size, parts.rotary, shared]
        of_last[3:] = [at.output, parts.last_norm.at(), hidden, bits_of(parts.last_norm.eps)]
        of_attention[:] = [at.q, 0, 0, at.attended, size, 0, 0, 0, 0, 0, size, self.group, shared // self.group,
                           bits_of(parts.scale), self._exp, at.sums]  # fmt: skip

    def set(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        place: Place,
        after: torch.Tensor,
        normed: torch.Tensor,
    ) -> None:
        """Write the arguments that differ from token to token: the addresses of its inputs and outputs, and its place
        in the KV cache."""
        of_norm, of_heads, of_last, of_attention = self._words
        keys, values, begin, end = place
        _, key_head, key_row, _ = keys.stride()
        _, value_head, value_row, _ = values.stride()
        key_at, value_at, x = keys.data_ptr(), values.data_ptr(), hidden.data_ptr()
        of_norm[0] = x
        struct.pack_into("6q", of_heads, 0, cos.data_ptr(), sin.data_ptr(), key_at + 2 * key_row * end,
                         value_at + 2 * value_row * end, key_head, value_head)  # fmt: skip
        struct.pack_into("3q", of_last, 0, x, after.data_ptr(), normed.data_ptr())
        struct.pack_into("2q", of_attention, 8, key_at + 2 * key_row * begin, value_at + 2 * value_row * begin)
        struct.pack_into("5q", of_attention, 40, key_head, key_row, value_head, value_row, end + 1 - begin)


def bits_of(number: float) -> int:
    """Return the bits of a float32 number as an integer."""
    (bits,) = struct.unpack("I", struct.pack("f", number))
    return int(bits)


@functools.cache
def functions_of_layers() -> tuple[int, int, int, int]:
    """Return the addresses of the functions with the arguments `NORM`, `HEADS`, `LAST` and `PROMPT_HEADS`, which are
    compiled once per process."""
    signature = (ctypes.c_void_p, ctypes.c_longlong)
    names = ("norm_row", "turn_heads", "add_and_norm", "turn_rows")
    one, two, three, four = map(address_of, compile_functions(Source(source), dict.fromkeys(names, signature)))
    return one, two, three, four


def source() -> str:
    """Return the LLVM text of `norm_row`, `turn_heads`, `add_and_norm` and `turn_rows`. Each is called as f(arguments,
    unit)."""
    from smoe.kernels.token_attention_code import module_of

    return module_of()
