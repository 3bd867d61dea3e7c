"""The values weighted by a query's softmax, p . v, as LLVM text for `attention.py`.

torch's order of sums: p is rounded to bf16. For four keys at a time, an output adds ((p0 * v0 + p2 * v2) + (p1 * v1 +
p3 * v3)). One to three keys may remain; they are added one at a time, the last key first. Outputs are in float32 until
all keys have been added. Outputs are computed in tiles of 32 elements: 16 of even index, then 16 of odd index,
because the registers hold the values in this order.
"""

from __future__ import annotations

from smoe.kernels.registers import broadcast, filled, joined, rounded
from smoe.kernels.tile import TILE, fetched, in_float32

_AHEAD = 16
"""The number of values that are prefetched into the second-level cache (measurements in `scores.py`)."""


def source(row: int) -> str:
    """Return the LLVM text of `weigh` and `finish`. `row`: the number of floats from one head's weights to the next
    head's."""
    return _weigh(row) + "\n" + _finish()


def _weigh(row: int) -> str:
    """Return LLVM text that computes totals[h] += p[h, n] * v[n]: four keys at a time, then the remaining ones from the
    last on; in tiles of 32 elements d, and then heads."""
    return f"""
define internal void @weigh(ptr noalias %p, ptr noalias %v, i64 %stride, i64 %n, i64 %size, i64 %group,
                            ptr noalias %totals) #1 {{
entry:
  %whole = and i64 %n, -4
  %ahead = mul i64 %stride, {_AHEAD}
  %any.whole = icmp sgt i64 %whole, 0
  br i1 %any.whole, label %four, label %left
{_four_keys(row)}
{_one_key(row)}
done:
  ret void
}}
"""


def _four_keys(row: int) -> str:
    """Return the LLVM basic blocks from `four` to `four.end`, which add four keys at a time. They continue at
    `left`."""
    return f"""\
four:
  %k = phi i64 [0, %entry], [%k.next, %four.end]
  %row0.offset = mul i64 %k, %stride
  %row0 = getelementptr i16, ptr %v, i64 %row0.offset
{joined(f"  %row{i} = getelementptr i16, ptr %row{i - 1}, i64 %stride" for i in range(1, 4))}
  br label %tile
tile:
  %d = phi i64 [0, %four], [%d.next, %tile.end]
{joined(_value(i, f"%row{i}", "%d") for i in range(4))}
{joined(fetched(f"%v{i}.at", f"{i}") for i in range(4))}
  br label %head
head:
  %h = phi i64 [0, %tile], [%h.next, %head]
  %p.head = mul i64 %h, {row}
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
  br i1 %k.more, label %four, label %left"""


def _one_key(row: int) -> str:
    """Return the LLVM basic blocks from `left` to `left.end`, which add the remaining keys. They continue at `done`."""
    return f"""\
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
  %tp.head = mul i64 %th, {row}
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
  br label %left"""


def _value(i: int, row: str, d: str) -> str:
    return f"""\
  %v{i}.at = getelementptr i16, ptr {row}, i64 {d}
  %v{i} = load <8 x i64>, ptr %v{i}.at, align 2
{in_float32(f"{i}", f"%v{i}")}"""


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
    """Return LLVM text that computes out[h] = totals[h] times the reciprocal of the sum of weights, in bf16 and in the
    order of the elements d."""
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
