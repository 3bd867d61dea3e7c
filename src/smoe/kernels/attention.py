"""Computes attention of one query token over a bf16 KV cache, several times faster than torch and with torch's bits.

In decoding, torch computes each query head as a matrix product with one column, for which MKL has no fast bf16 code. It
takes 1 ms for 16 heads of 128 elements and 300 keys, where memory bandwidth would allow 30 us. Four columns at once
would be ten times faster, with other bits. So this kernel sums in torch's order, and computes only independent sums in
parallel:

    q . k      scores.py             four running sums per key
    softmax    softmax.py            in blocks of 512 keys
    p . v      weighted_values.py    four keys at a time; after each block, earlier totals are multiplied by
                                     exp(old maximum - new maximum)

Query heads that share a key head are computed together, so that each key and value is loaded once. Products of two bf16
numbers are exact in float32, so fused multiplication and addition changes no bit. Before the kernel is used, its bits
are compared with torch's on the same machine (`fastpath/attention.py`). Measurements are in docs/log/kernels.md.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

from smoe.kernels import scores, softmax, weighted_values
from smoe.kernels.jit import Source, address_of, compile_functions
from smoe.kernels.registers import joined
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.tile import TILE

BLOCK = 512
"""The number of keys in a block of the softmax."""
_ROW = BLOCK + 16
"""The number of floats for a head's scores. It is padded because whole registers are written."""
_MOST_HEADS = 16
"""The largest number of query heads in a unit, the work that one thread takes at a time. Each head needs memory on the
thread's stack."""
_WAKING_PRODUCTS = 1 << 21
"""The number of multiplications below which one thread is faster than waking others that sleep."""
_FIELDS = ("query", "keys", "values", "out", "query_head", "key_head", "key_row", "value_head", "value_row", "count",
           "size", "group", "splits", "scale", "exp", "sums")  # fmt: skip
"""The arguments of the kernel, as words of 8 bytes. In this order: the addresses of query, keys, values and output; the
distances in elements between heads and between keys; the number of keys; the head size; query heads per unit; units per
key head; the scale (a float32's bits); the addresses of expf and of `sums`."""


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether the attention kernel supports these tensors: query [1, heads, 1, size], keys and values [1, key
    heads, n, size]."""
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
    pool: SpinningPool, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output of one token [1, 1, heads, size], and two numbers of each head's softmax as float32
    [heads, 2]: the largest score, and the sum of exp(score - largest). `query`, `keys` and `values` have the shapes
    that `fits` describes."""
    heads, size, count = query.shape[1], query.shape[3], keys.shape[2]
    shared = heads // keys.shape[1]
    group = group_of(shared, heads, pool.threads)
    out, sums = query.new_empty(1, 1, heads, size), torch.empty(heads, 2, dtype=torch.float32)
    compute, exp = functions()
    (scale_bits,) = struct.unpack("I", struct.pack("f", scale))
    fields = (
        *(t.data_ptr() for t in (query, keys, values, out)),
        *(query.stride(1), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2)),
        *(count, size, group, shared // group, scale_bits, exp, sums.data_ptr()),
    )
    assert len(fields) == len(_FIELDS), f"{len(fields)} fields of {len(_FIELDS)}"
    pool.share(compute, fields, heads // group, is_long=heads * count * size >= _WAKING_PRODUCTS)
    return out, sums


def group_of(shared: int, heads: int, threads: int) -> int:
    """Return the number of query heads that one thread computes at a time: all query heads that share a key head
    (`shared`), or a divisor of their number if threads would otherwise be idle."""
    parts = [n for n in range(1, shared + 1) if shared % n == 0 and n <= _MOST_HEADS]
    return max((n for n in parts if heads // n >= 2 * threads), default=1)


@functools.cache
def libm() -> ctypes.CDLL | None:
    """Return the C mathematical library (glibc's libm), whose `expf` has torch's bits, or None on systems without
    glibc."""
    try:
        return ctypes.CDLL("libm.so.6")
    except OSError:
        return None


@functools.cache
def functions() -> tuple[int, int]:
    """Return the addresses of the kernel, which is compiled once per process, and of libm's expf."""
    mathematics = libm()
    assert mathematics is not None, "call this only where `libm` returns a library"
    signature = (ctypes.c_void_p, ctypes.c_longlong)
    (attention,) = compile_functions(Source(source), {"attention": signature})
    return address_of(attention), address_of(mathematics.expf)


def source() -> str:
    """Return the LLVM text of the kernel. Its function `attention(fields, unit)` computes the query heads of a unit."""
    return f"""
declare i64 @llvm.smin.i64(i64, i64)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
{_attention()}
{_CLEAR}
{scores.source(_ROW)}
{softmax.source()}
{weighted_values.source(_ROW)}
"""


def _attention() -> str:
    """Return the LLVM text of the kernel's main function: a loop over blocks of 512 keys, with temporary memory on the
    stack."""
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
{_own_part()}
  call void @spread(ptr %queries, ptr %q, i64 %query_head, i64 %size, i64 %group)
  call void @clear(ptr %totals, i64 %numbers)
  call void @clear(ptr %pairs, i64 %pairs.count)
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


_CLEAR = """
define internal void @clear(ptr %floats, i64 %count) #1 {
entry:
  br label %register
register:
  %n = phi i64 [0, %entry], [%n.next, %register]
  %at = getelementptr float, ptr %floats, i64 %n
  store <16 x float> zeroinitializer, ptr %at, align 64
  %n.next = add i64 %n, 16
  %more = icmp slt i64 %n.next, %count
  br i1 %more, label %register, label %done
done:
  ret void
}
"""
"""The LLVM text of a function that sets a multiple of 16 float32 numbers to zero. The C library's memset is not used,
because its address changes between processes."""


def _own_part() -> str:
    """Return LLVM text that computes the addresses of the query heads, keys, values, outputs and sums of one unit of
    work, and allocates temporary memory for the unit."""
    return f"""\
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
  %state = getelementptr float, ptr %state.base, i64 %state.first"""
