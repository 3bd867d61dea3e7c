"""Attention of one query token over a KV cache in bf16: torch's bits, several times faster.

Decoding, every query head meets every key once, which torch hands to a matrix product of one column, and MKL (the
library below it) has no fast way for that in bf16: 1 ms for 16 heads of 128 at 300 keys, where memory needs 30 us. Four
columns would be ten times faster, with other bits. So the order of torch's sums is copied here, and only what is
independent of each other is put side by side:

    q . k      four running sums a key, of d = 0, 4, 8 ...; 1, 5, 9 ...; 2 ...; 3 ...; then (s0 + s2) + (s1 + s3)
    softmax    in blocks of 512 keys: exp in whole registers of 16 by a polynomial, the rest by libm's expf; two running
               sums of registers in turn, folded by halves, then the rest one by one
    p . v      p rounded to bf16; an output takes ((p0 v0 + p2 v2) + (p1 v1 + p3 v3)) of four keys at a time, the up to
               three left over last one first; from block to block it is scaled by exp(old maximum - new maximum)

    memory: K, key by key                    registers: 8 x 8 groups of four d, transposed
    key n    | d0 .. d3 | d4 .. d7 | ... ->  d0 .. d3    of keys n .. n+7     as d0, d2 and d1, d3 in float32
    key n+1  | d0 .. d3 | d4 .. d7 | ...     d4 .. d7    of keys n .. n+7

What a group of query heads shares, a key's and a value's way into the registers, is done once for all of them. Products
of two bf16 numbers are exact in float32, so it does not matter that they are fused with the sums here. Whether the bits
agree on the machine at hand is proven before the kernel is used (`runtime/attention.py`). Figures in docs/log.md.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

from smoe.kernels import softmax
from smoe.kernels.crew import Crew
from smoe.kernels.jit import address_of, compile_functions
from smoe.kernels.registers import broadcast, filled, joined, rounded, transposed

TILE = 32
"""Head sizes must be multiples of it: bf16 numbers of one register."""
BLOCK = 512
"""Keys whose softmax is computed together."""
_KEYS = 8
"""Keys whose products with the queries are computed together."""
_AHEAD = {"keys": 32, "values": 16}
"""Keys and values that are fetched ahead into the second cache level: 3000 take 0.48 ms from memory, else 0.78."""
_ROW = BLOCK + 16
"""Floats of one head's scores: whole registers may be written at the end."""
_MOST_HEADS = 16
"""Query heads of a unit: what they need of a thread's stack grows with them."""
_WAKING_PRODUCTS = 1 << 21
"""Fewer products of a query's with a key's number take less time than waking a sleeper."""
_FIELDS = ("query", "keys", "values", "out", "query_head", "key_head", "key_row", "value_head", "value_row", "count",
           "size", "group", "splits", "scale", "exp", "sums")  # fmt: skip
"""Words of 8 bytes that describe the work: addresses of the query, K, V and out; strides in numbers from head to head
and from key to key; keys; head size; query heads of a unit; units of a key head; scale (the bits of a float32);
addresses of expf and of `sums`."""


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether query [1, heads, 1, size] and K, V [1, key heads, n, size] are of a kind that the kernel knows."""
    tensors = query, keys, values
    rows, heads, tokens, size = query.shape
    return (
        rows == tokens == 1
        and keys.shape == values.shape
        and keys.shape[0] == 1
        and keys.shape[2] > 0
        and keys.shape[3] == size
        and size % TILE == 0
        and heads % keys.shape[1] == 0
        and all(t.dtype is torch.bfloat16 and t.device.type == "cpu" and t.stride(3) == 1 for t in tensors)
    )


def attend(
    crew: Crew, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token, tensors as in `fits`: [1, 1, heads, size].

    With it, for each head, the largest score and the sum of exp(score - largest): [heads, 2] in float32.
    """
    heads, size, count = query.shape[1], query.shape[3], keys.shape[2]
    shared = heads // keys.shape[1]
    group = _group(shared, heads, crew.threads)
    out, sums = query.new_empty(1, 1, heads, size), torch.empty(heads, 2)
    compute, exp = _functions()
    (scale_bits,) = struct.unpack("I", struct.pack("f", scale))
    fields = (
        *(t.data_ptr() for t in (query, keys, values, out)),
        *(query.stride(1), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2)),
        *(count, size, group, shared // group, scale_bits, exp, sums.data_ptr()),
    )
    assert len(fields) == len(_FIELDS), f"{len(fields)} fields of {len(_FIELDS)}"
    crew.share(compute, fields, heads // group, is_long=heads * count * size >= _WAKING_PRODUCTS)
    return out, sums


def _group(shared: int, heads: int, threads: int) -> int:
    """Query heads of a unit: as many as share their keys, or a part of them where that gives too few units."""
    parts = [n for n in range(1, shared + 1) if shared % n == 0 and n <= _MOST_HEADS]
    return max((n for n in parts if heads // n >= 2 * threads), default=1)


@functools.cache
def libm() -> ctypes.CDLL | None:
    """The C library's mathematics, whose bits torch's are; None on systems without this one."""
    try:
        return ctypes.CDLL("libm.so.6")
    except OSError:
        return None


@functools.cache
def _functions() -> tuple[int, int]:
    """Addresses of the kernel, made once a process, and of libm's expf."""
    mathematics = libm()
    assert mathematics is not None, "nobody asks where there is none"
    signature = (ctypes.c_void_p, ctypes.c_longlong)
    (attention,) = compile_functions(source(), {"attention": signature})
    return address_of(attention), address_of(mathematics.expf)


def source() -> str:
    """The kernel in LLVM's language: `attention(fields, unit)` computes the unit's query heads."""
    return f"""
declare i64 @llvm.smin.i64(i64, i64)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
{_attention()}
{_scores()}
{softmax.source()}
{_weigh()}
{_spread()}
{_finish()}
"""


def _attention() -> str:
    """Blocks of 512 keys, one after the other; what lies between them is in memory of this call's own."""
    loads = [
        f"  %{name}.at = getelementptr i64, ptr %fields, i64 {n}\n  %{name} = load i64, ptr %{name}.at"
        for n, name in enumerate(_FIELDS)
    ]
    return f"""
define void @attention(ptr %fields, i64 %unit) #1 {{
entry:
{joined(loads)}
  %expf = inttoptr i64 %exp to ptr
  %scale.bits = trunc i64 %scale to i32
  %scale.f = bitcast i32 %scale.bits to float
  %first = mul i64 %unit, %group
  %kv = sdiv i64 %unit, %splits
  %q.offset = mul i64 %first, %query_head
  %q.base = inttoptr i64 %query to ptr
  %q = getelementptr i16, ptr %q.base, i64 %q.offset
  %k.offset = mul i64 %kv, %key_head
  %k.base = inttoptr i64 %keys to ptr
  %k = getelementptr i16, ptr %k.base, i64 %k.offset
  %v.offset = mul i64 %kv, %value_head
  %v.base = inttoptr i64 %values to ptr
  %v = getelementptr i16, ptr %v.base, i64 %v.offset
  %o.offset = mul i64 %first, %size
  %o.base = inttoptr i64 %out to ptr
  %o = getelementptr i16, ptr %o.base, i64 %o.offset
  %numbers = mul i64 %group, %size
  %pairs.count = mul i64 %group, 32
  %rows = mul i64 %group, {_ROW}
  %queries = alloca float, i64 %numbers, align 64
  %totals = alloca float, i64 %numbers, align 64
  %pairs = alloca float, i64 %pairs.count, align 64
  %s = alloca float, i64 %rows, align 64
  %state.base = inttoptr i64 %sums to ptr
  %state.first = mul i64 %first, 2
  %state = getelementptr float, ptr %state.base, i64 %state.first
  call void @spread(ptr %queries, ptr %q, i64 %query_head, i64 %size, i64 %group)
  %totals.bytes = mul i64 %numbers, 4
  call void @llvm.memset.p0.i64(ptr %totals, i8 0, i64 %totals.bytes, i1 false)
  %pairs.bytes = mul i64 %pairs.count, 4
  call void @llvm.memset.p0.i64(ptr %pairs, i8 0, i64 %pairs.bytes, i1 false)
  br label %block
block:
  %b = phi i64 [0, %entry], [%b.next, %weigh]
  %b.next = add i64 %b, {BLOCK}
  %b.end = call i64 @llvm.smin.i64(i64 %b.next, i64 %count)
  %n = sub i64 %b.end, %b
  %k.from = mul i64 %b, %key_row
  %k.block = getelementptr i16, ptr %k, i64 %k.from
  %v.from = mul i64 %b, %value_row
  %v.block = getelementptr i16, ptr %v, i64 %v.from
  call void @scores(ptr %queries, ptr %k.block, i64 %key_row, i64 %n, i64 %size, i64 %group, ptr %pairs, ptr %s)
  %is.first = icmp eq i64 %b, 0
  br label %head
head:
  %h = phi i64 [0, %block], [%h.next, %head]
  %s.offset = mul i64 %h, {_ROW}
  %s.head = getelementptr float, ptr %s, i64 %s.offset
  %totals.offset = mul i64 %h, %size
  %totals.head = getelementptr float, ptr %totals, i64 %totals.offset
  %state.offset = mul i64 %h, 2
  %state.head = getelementptr float, ptr %state, i64 %state.offset
  call void @softmax(ptr %s.head, i64 %n, float %scale.f, i1 %is.first, ptr %state.head, ptr %totals.head, i64 %size,
                     ptr %expf)
  %h.next = add i64 %h, 1
  %h.more = icmp slt i64 %h.next, %group
  br i1 %h.more, label %head, label %weigh
weigh:
  call void @weigh(ptr %s, ptr %v.block, i64 %value_row, i64 %n, i64 %size, i64 %group, ptr %totals)
  %b.more = icmp slt i64 %b.next, %count
  br i1 %b.more, label %block, label %done
done:
  call void @finish(ptr %o, ptr %totals, ptr %state, i64 %size, i64 %group)
  ret void
}}
attributes #1 = {{ noinline nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }}
"""


def _spread() -> str:
    """Queries in float32, of every four numbers 0, 2, 1, 3: as the keys' lie in their registers."""
    return """
define internal void @spread(ptr noalias %to, ptr noalias %q, i64 %stride, i64 %size, i64 %group) #1 {
entry:
  br label %head
head:
  %h = phi i64 [0, %entry], [%h.next, %head.end]
  %from.offset = mul i64 %h, %stride
  %from = getelementptr i16, ptr %q, i64 %from.offset
  %to.offset = mul i64 %h, %size
  %to.head = getelementptr float, ptr %to, i64 %to.offset
  br label %four
four:
  %d = phi i64 [0, %head], [%d.next, %four]
  %p = getelementptr i16, ptr %from, i64 %d
  %x = load <4 x i16>, ptr %p, align 2
  %wide = zext <4 x i16> %x to <4 x i32>
  %bits = shl <4 x i32> %wide, <i32 16, i32 16, i32 16, i32 16>
  %ordered = shufflevector <4 x i32> %bits, <4 x i32> poison, <4 x i32> <i32 0, i32 2, i32 1, i32 3>
  %at = getelementptr float, ptr %to.head, i64 %d
  store <4 x i32> %ordered, ptr %at, align 4
  %d.next = add i64 %d, 4
  %d.more = icmp slt i64 %d.next, %size
  br i1 %d.more, label %four, label %head.end
head.end:
  %h.next = add i64 %h, 1
  %h.more = icmp slt i64 %h.next, %group
  br i1 %h.more, label %head, label %done
done:
  ret void
}
"""


def _scores() -> str:
    """s[h, n] = q[h] . k[n]: groups of 8 keys (the last key again where fewer are left), tiles of 32 d, then heads.

    `pairs` [h, 2, 16] holds a group's running sums, s0 and s2 of each key, then s1 and s3; zero between groups.
    """
    transposing, fours = transposed([f"%r{i}" for i in range(_KEYS)], "i64")
    evens, odds = (", ".join(f"i32 {2 * i + odd}" for i in range(8)) for odd in (0, 1))
    return f"""
define internal void @scores(ptr noalias %q, ptr noalias %k, i64 %stride, i64 %n, i64 %size, i64 %group,
                             ptr noalias %pairs, ptr noalias %s) #1 {{
entry:
  %last = sub i64 %n, 1
  %ahead = mul i64 %stride, {_AHEAD["keys"]}
  br label %keys
keys:
  %g = phi i64 [0, %entry], [%g.next, %keys.end]
{joined(_row(i) for i in range(_KEYS))}
  br label %tile
tile:
  %d = phi i64 [0, %keys], [%d.next, %tile.end]
{joined(f"  %p{i} = getelementptr i16, ptr %row{i}, i64 %d" for i in range(_KEYS))}
{joined(f"  %r{i} = load <8 x i64>, ptr %p{i}, align 2" for i in range(_KEYS))}
{joined(_fetch(f"%p{i}", f"{i}") for i in range(_KEYS))}
{joined(transposing)}
{joined(_widen(f"{j}", four) for j, four in enumerate(fours))}
  br label %head
head:
  %h = phi i64 [0, %tile], [%h.next, %head]
  %pair.offset = mul i64 %h, 32
  %even.at = getelementptr float, ptr %pairs, i64 %pair.offset
  %odd.at = getelementptr float, ptr %even.at, i64 16
  %even.0 = load <16 x float>, ptr %even.at, align 64
  %odd.0 = load <16 x float>, ptr %odd.at, align 64
  %q.head = mul i64 %h, %size
  %q.offset = add i64 %q.head, %d
  %q.at = getelementptr float, ptr %q, i64 %q.offset
{joined(_multiply(j) for j in range(8))}
  store <16 x float> %even.8, ptr %even.at, align 64
  store <16 x float> %odd.8, ptr %odd.at, align 64
  %h.next = add i64 %h, 1
  %h.more = icmp slt i64 %h.next, %group
  br i1 %h.more, label %head, label %tile.end
tile.end:
  %d.next = add i64 %d, {TILE}
  %d.more = icmp slt i64 %d.next, %size
  br i1 %d.more, label %tile, label %total
total:
  %t = phi i64 [0, %tile.end], [%t.next, %total]
  %total.offset = mul i64 %t, 32
  %e.at = getelementptr float, ptr %pairs, i64 %total.offset
  %o.at = getelementptr float, ptr %e.at, i64 16
  %e = load <16 x float>, ptr %e.at, align 64
  %o = load <16 x float>, ptr %o.at, align 64
  store <16 x float> zeroinitializer, ptr %e.at, align 64
  store <16 x float> zeroinitializer, ptr %o.at, align 64
  %s0 = shufflevector <16 x float> %e, <16 x float> poison, <8 x i32> <{evens}>
  %s2 = shufflevector <16 x float> %e, <16 x float> poison, <8 x i32> <{odds}>
  %s1 = shufflevector <16 x float> %o, <16 x float> poison, <8 x i32> <{evens}>
  %s3 = shufflevector <16 x float> %o, <16 x float> poison, <8 x i32> <{odds}>
  %s02 = fadd <8 x float> %s0, %s2
  %s13 = fadd <8 x float> %s1, %s3
  %score = fadd <8 x float> %s02, %s13
  %s.head = mul i64 %t, {_ROW}
  %s.offset = add i64 %s.head, %g
  %s.at = getelementptr float, ptr %s, i64 %s.offset
  store <8 x float> %score, ptr %s.at, align 4
  %t.next = add i64 %t, 1
  %t.more = icmp slt i64 %t.next, %group
  br i1 %t.more, label %total, label %keys.end
keys.end:
  %g.next = add i64 %g, {_KEYS}
  %g.more = icmp slt i64 %g.next, %n
  br i1 %g.more, label %keys, label %done
done:
  ret void
}}
"""


def _row(i: int) -> str:
    return f"""\
  %i{i} = add i64 %g, {i}
  %n{i} = call i64 @llvm.smin.i64(i64 %i{i}, i64 %last)
  %o{i} = mul i64 %n{i}, %stride
  %row{i} = getelementptr i16, ptr %k, i64 %o{i}"""


def _fetch(at: str, name: str) -> str:
    """A hint to fetch what lies as far ahead; beyond the end it does nothing."""
    return f"""\
  %far{name} = getelementptr i16, ptr {at}, i64 %ahead
  call void @llvm.prefetch.p0(ptr %far{name}, i32 0, i32 2, i32 1)"""


def _widen(name: str, packed: str) -> str:
    """32 bf16 numbers in float32: those of even places and those of odd ones."""
    sixteen, high = filled("i32 16"), filled("i32 -65536")
    return f"""\
  %w{name} = bitcast <8 x i64> {packed} to <16 x i32>
  %l{name} = shl <16 x i32> %w{name}, {sixteen}
  %u{name} = and <16 x i32> %w{name}, {high}
  %e{name} = bitcast <16 x i32> %l{name} to <16 x float>
  %o{name}.f = bitcast <16 x i32> %u{name} to <16 x float>"""


def _multiply(j: int) -> str:
    """One step of the running sums: four d of all keys with the same four of one query."""

    def step(kind: str, key: str, at: int) -> str:
        return f"""\
  %q{kind}{j}.at = getelementptr float, ptr %q.at, i64 {at}
  %q{kind}{j} = load double, ptr %q{kind}{j}.at, align 4
  %q{kind}{j}.one = insertelement <8 x double> poison, double %q{kind}{j}, i64 0
  %q{kind}{j}.all = shufflevector <8 x double> %q{kind}{j}.one, <8 x double> poison, <8 x i32> zeroinitializer
  %q{kind}{j}.f = bitcast <8 x double> %q{kind}{j}.all to <16 x float>
  %{kind}.{j + 1} = call <16 x float> @llvm.fma.v16f32(
      <16 x float> {key}, <16 x float> %q{kind}{j}.f, <16 x float> %{kind}.{j})"""

    return step("even", f"%e{j}", 4 * j) + "\n" + step("odd", f"%o{j}.f", 4 * j + 2)


def _weigh() -> str:
    """totals[h] += p[h, n] v[n]: four keys at a time, then the rest from the last one on; tiles of 32 d, then heads.

    A tile of `totals` is 16 outputs of even places and then those of odd ones, as values lie in their registers.
    """
    return f"""
define internal void @weigh(ptr noalias %p, ptr noalias %v, i64 %stride, i64 %n, i64 %size, i64 %group,
                            ptr noalias %totals) #1 {{
entry:
  %whole = and i64 %n, -4
  %ahead = mul i64 %stride, {_AHEAD["values"]}
  %any.whole = icmp sgt i64 %whole, 0
  br i1 %any.whole, label %four, label %left
four:
  %k = phi i64 [0, %entry], [%k.next, %four.end]
  %row0.offset = mul i64 %k, %stride
  %row0 = getelementptr i16, ptr %v, i64 %row0.offset
{joined(f"  %row{i} = getelementptr i16, ptr %row{i - 1}, i64 %stride" for i in range(1, 4))}
  br label %tile
tile:
  %d = phi i64 [0, %four], [%d.next, %tile.end]
{joined(_value(i, f"%row{i}", "%d") for i in range(4))}
{joined(_fetch(f"%v{i}.at", f"{i}") for i in range(4))}
  br label %head
head:
  %h = phi i64 [0, %tile], [%h.next, %head]
  %p.head = mul i64 %h, {_ROW}
  %p.offset = add i64 %p.head, %k
  %p.at = getelementptr float, ptr %p, i64 %p.offset
{joined(_weight(i, "%p.at") for i in range(4))}
{_totals_at("%h", "%d")}
{_add_four("even", "e")}
{_add_four("odd", "o")}
  %h.next = add i64 %h, 1
  %h.more = icmp slt i64 %h.next, %group
  br i1 %h.more, label %head, label %tile.end
tile.end:
  %d.next = add i64 %d, {TILE}
  %d.more = icmp slt i64 %d.next, %size
  br i1 %d.more, label %tile, label %four.end
four.end:
  %k.next = add i64 %k, 4
  %k.more = icmp slt i64 %k.next, %whole
  br i1 %k.more, label %four, label %left
left:
  %after = phi i64 [%n, %entry], [%n, %four.end], [%l, %left.end]
  %l = sub i64 %after, 1
  %any.left = icmp sge i64 %l, %whole
  br i1 %any.left, label %one, label %done
one:
  %row.offset = mul i64 %l, %stride
  %row = getelementptr i16, ptr %v, i64 %row.offset
  br label %one.tile
one.tile:
  %td = phi i64 [0, %one], [%td.next, %one.tile.end]
{_value(9, "%row", "%td")}
  br label %one.head
one.head:
  %th = phi i64 [0, %one.tile], [%th.next, %one.head]
  %tp.head = mul i64 %th, {_ROW}
  %tp.offset = add i64 %tp.head, %l
  %tp.at = getelementptr float, ptr %p, i64 %tp.offset
{_weight(9, "%tp.at", 0)}
{_totals_at("%th", "%td", "one.")}
{_add_one("even", "%e9")}
{_add_one("odd", "%o9.f")}
  %th.next = add i64 %th, 1
  %th.more = icmp slt i64 %th.next, %group
  br i1 %th.more, label %one.head, label %one.tile.end
one.tile.end:
  %td.next = add i64 %td, {TILE}
  %td.more = icmp slt i64 %td.next, %size
  br i1 %td.more, label %one.tile, label %left.end
left.end:
  br label %left
done:
  ret void
}}
"""


def _value(i: int, row: str, d: str) -> str:
    return f"""\
  %v{i}.at = getelementptr i16, ptr {row}, i64 {d}
  %v{i} = load <8 x i64>, ptr %v{i}.at, align 2
{_widen(f"{i}", f"%v{i}")}"""


def _weight(i: int, at: str, offset: int | None = None) -> str:
    return f"""\
  %p{i}.at = getelementptr float, ptr {at}, i64 {i if offset is None else offset}
  %p{i} = load float, ptr %p{i}.at
{broadcast(f"p{i}", f"%p{i}")}"""


def _totals_at(h: str, d: str, prefix: str = "") -> str:
    return f"""\
  %{prefix}totals.head = mul i64 {h}, %size
  %{prefix}totals.offset = add i64 %{prefix}totals.head, {d}
  %{prefix}even.at = getelementptr float, ptr %totals, i64 %{prefix}totals.offset
  %{prefix}odd.at = getelementptr float, ptr %{prefix}even.at, i64 16
  %{prefix}even.old = load <16 x float>, ptr %{prefix}even.at, align 64
  %{prefix}odd.old = load <16 x float>, ptr %{prefix}odd.at, align 64"""


def _add_four(kind: str, letter: str) -> str:
    v = [f"%e{i}" if letter == "e" else f"%o{i}.f" for i in range(4)]
    fma = "call <16 x float> @llvm.fma.v16f32"
    return f"""\
  %{kind}.p0 = fmul <16 x float> %p0.all, {v[0]}
  %{kind}.p02 = {fma}(<16 x float> %p2.all, <16 x float> {v[2]}, <16 x float> %{kind}.p0)
  %{kind}.p1 = fmul <16 x float> %p1.all, {v[1]}
  %{kind}.p13 = {fma}(<16 x float> %p3.all, <16 x float> {v[3]}, <16 x float> %{kind}.p1)
  %{kind}.four = fadd <16 x float> %{kind}.p02, %{kind}.p13
  %{kind}.new = fadd <16 x float> %{kind}.old, %{kind}.four
  store <16 x float> %{kind}.new, ptr %{kind}.at, align 64"""


def _add_one(kind: str, v: str) -> str:
    return f"""\
  %one.{kind}.new = call <16 x float> @llvm.fma.v16f32(
      <16 x float> %p9.all, <16 x float> {v}, <16 x float> %one.{kind}.old)
  store <16 x float> %one.{kind}.new, ptr %one.{kind}.at, align 64"""


def _finish() -> str:
    """out[h] = totals[h] times the reciprocal of the sum, in bf16 and in the order of d again."""
    return f"""
define internal void @finish(ptr noalias %out, ptr noalias %totals, ptr noalias %state, i64 %size, i64 %group) #1 {{
entry:
  br label %head
head:
  %h = phi i64 [0, %entry], [%h.next, %head.end]
  %state.offset = mul i64 %h, 2
  %sum.offset = add i64 %state.offset, 1
  %sum.at = getelementptr float, ptr %state, i64 %sum.offset
  %sum = load float, ptr %sum.at
  %reciprocal = fdiv float 1.0, %sum
{broadcast("reciprocal", "%reciprocal")}
  br label %tile
tile:
  %d = phi i64 [0, %head], [%d.next, %tile]
{_totals_at("%h", "%d")}
  %even = fmul <16 x float> %even.old, %reciprocal.all
  %odd = fmul <16 x float> %odd.old, %reciprocal.all
  %even.bits = bitcast <16 x float> %even to <16 x i32>
  %odd.bits = bitcast <16 x float> %odd to <16 x i32>
{rounded("even.rounded", "%even.bits")}
{rounded("odd.rounded", "%odd.bits")}
  %low = lshr <16 x i32> %even.rounded, {filled("i32 16")}
  %both = or <16 x i32> %low, %odd.rounded
  %to = getelementptr i16, ptr %out, i64 %totals.offset
  store <16 x i32> %both, ptr %to, align 2
  %d.next = add i64 %d, {TILE}
  %d.more = icmp slt i64 %d.next, %size
  br i1 %d.more, label %tile, label %head.end
head.end:
  %h.next = add i64 %h, 1
  %h.more = icmp slt i64 %h.next, %group
  br i1 %h.more, label %head, label %done
done:
  ret void
}}
"""
