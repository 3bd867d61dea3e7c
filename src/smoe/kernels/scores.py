"""The scores q . k of one query token with every key, as LLVM text for `attention.py`.

torch's order has four running sums per key, over the elements d = 0, 4, 8 ...; 1, 5, 9 ...; 2 ...; and 3 .... The score
is (s0 + s2) + (s1 + s3). Here keys are transposed in registers:

    memory: K, key by key                       registers: 8 x 8 groups of four d, transposed
    key n    | d0 .. d3 | d4 .. d7 | ...  ->    d0 .. d3    of keys n .. n+7      as d0, d2 and d1, d3 in float32
    key n+1  | d0 .. d3 | d4 .. d7 | ...        d4 .. d7    of keys n .. n+7

So a register has the running sums of eight keys, and keys are transposed once for all query heads that share them.
"""

from __future__ import annotations

from smoe.kernels.registers import joined, transposed
from smoe.kernels.tile import TILE, fetched, in_float32

_KEYS = 8
"""The number of keys that are multiplied together."""
_AHEAD = 32
"""The number of keys that are prefetched into the second-level cache. 3000 keys and values then take 0.48 ms from
memory instead of 0.78."""


def source(row: int) -> str:
    """Return the LLVM text of `spread` and `scores`. `row`: the number of floats from one head's scores to the next
    head's."""
    return _scores(row) + "\n" + _SPREAD


_SPREAD = """
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
"""The LLVM text of a function that converts queries to float32. Of each four elements the order becomes 0, 2, 1, 3, as
in the transposed keys."""


def _scores(row: int) -> str:
    """Return LLVM text that computes s[h, n] = q[h] . k[n], the scores of all keys for all query heads.

    The loops are, from the outside: groups of 8 keys (the last key is repeated), tiles of 32 elements d, and heads.
    `pairs` [h, 2, 16] contains the running sums of a group of keys: s0 and s2 of each key, then s1 and s3. Between two
    groups `pairs` is zero.
    """
    return f"""
define internal void @scores(ptr noalias %q, ptr noalias %k, i64 %stride, i64 %n, i64 %size, i64 %group,
                             ptr noalias %pairs, ptr noalias %s) #1 {{
entry:
  %last = sub i64 %n, 1
  %ahead = mul i64 %stride, {_AHEAD}
  br label %keys
keys:
  %g = phi i64 [0, %entry], [%g.next, %keys.end]
{joined(_row(i) for i in range(_KEYS))}
  br label %tile
tile:
  %d = phi i64 [0, %keys], [%d.next, %tile.end]
{_tile()}
  br label %head
head:
  %h = phi i64 [0, %tile], [%h.next, %head]
{_products()}
  %h.next = add i64 %h, 1
  %h.more = icmp slt i64 %h.next, %group
  br i1 %h.more, label %head, label %tile.end
tile.end:
  %d.next = add i64 %d, {TILE}
  %d.more = icmp slt i64 %d.next, %size
  br i1 %d.more, label %tile, label %total
total:
  %t = phi i64 [0, %tile.end], [%t.next, %total]
{_total(row)}
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


def _tile() -> str:
    """Return LLVM text that loads a tile of 8 keys and transposes it into `%e0` to `%e7` and `%o0.f` to `%o7.f`.
    Registers `%eN` and `%oN.f` together contain four elements d of all keys."""
    transposing, fours = transposed([f"%r{i}" for i in range(_KEYS)], "i64")
    return f"""\
{joined(f"  %p{i} = getelementptr i16, ptr %row{i}, i64 %d" for i in range(_KEYS))}
{joined(f"  %r{i} = load <8 x i64>, ptr %p{i}, align 2" for i in range(_KEYS))}
{joined(fetched(f"%p{i}", f"{i}") for i in range(_KEYS))}
{joined(transposing)}
{joined(in_float32(f"{j}", four) for j, four in enumerate(fours))}"""


def _products() -> str:
    """Return LLVM text that multiplies a tile of all keys with the same tile of the query of head `%h`, and adds the
    products to the running sums."""
    return f"""\
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
  store <16 x float> %odd.8, ptr %odd.at, align 64"""


def _multiply(j: int) -> str:
    """Return LLVM text for step `j` of the running sums: four elements d of all keys times the same four elements of
    one query."""

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


def _total(row: int) -> str:
    """Return LLVM text that makes eight scores from the running sums of head `%t`, and resets the sums."""
    evens, odds = (", ".join(f"i32 {2 * i + odd}" for i in range(8)) for odd in (0, 1))
    return f"""\
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
  %s.head = mul i64 %t, {row}
  %s.offset = add i64 %s.head, %g
  %s.at = getelementptr float, ptr %s, i64 %s.offset
  store <8 x float> %score, ptr %s.at, align 4"""
