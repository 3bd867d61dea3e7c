"""One row times a matrix in bf16: oneDNN's bits at the memory's rate.

Decoding one token multiplies one row by every matrix it meets, so each weight is used once and the memory's rate is the
limit. oneDNN (torch's CPU library) reaches half of it, because it first rearranges the matrix into a buffer of its own
as it would for many rows. Here 16 weight rows are transposed in registers instead:

    memory: W [N, K], row by row                 registers: 16 x 16 pairs of weights, transposed
    row n    | k k+1 | k+2 k+3 | ...  ->         pair k      of rows n .. n+15   dot x[k, k+1]
    row n+1  | k k+1 | ...                       pair k+2    of rows n .. n+15   dot x[k+2, k+3]
    ...                                          ...          each lane is one output

Grade E0 asks for the library's own bits, and a sum's bits are its order. oneDNN's (brgemm, AVX-512 BF16), found by
trying: for every output one running sum over k in steps of two, begun anew every 512 k; the chains' sums are added as
they come. Where outputs are few and k many, each of its threads sums a part of the k, and the parts are added at the
end. The same instruction is used here in the same order, so the bits agree. Whether they do on the machine at hand is
proven at load on the model's own weights (`crew.agrees`); where they do not, torch computes.

The next 16 rows are fetched into the second cache level while these are computed: a row of 768 is too short for the
hardware to see a pattern in it, and this doubles its rate. Figures in docs/log.md.
"""

from __future__ import annotations

import torch

from smoe.kernels.registers import filled, joined, transposed

LANES = 16
"""Outputs computed together: 32-bit lanes of one register."""
TILE = 32
"""k taken in one step: bf16 numbers of one register."""
CHAIN = 512
"""k after which the running sum begins anew."""
_LEAST_WEIGHTS = 16**3
"""torch gives products with no more multiplications than this to another library than oneDNN."""


def fits(matrix: torch.Tensor) -> bool:
    """Whether a matrix [K, N] is of a kind that the kernel knows."""
    columns, rows = matrix.shape
    is_rows = matrix.stride() == (1, columns) and matrix.dtype is torch.bfloat16 and matrix.device.type == "cpu"
    return is_rows and columns % TILE == 0 and rows % LANES == 0 and rows * columns > _LEAST_WEIGHTS


def source() -> str:
    """The kernel in LLVM's language: `row_product(x, w, out, bias, begin, end, K, part)`, outputs begin ... end - 1.

    Strips of 16 outputs, parts of so many k, chains of 512 k, tiles of 32 k. `bias` may be null; the library adds it
    before it rounds.
    """
    transposing, pairs = transposed([f"%r{i}" for i in range(LANES)], "i32")
    dots, total = _dots(pairs)
    return f"""
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i64 @llvm.smin.i64(i64, i64)

define internal void @row_product(
    ptr noalias %x, ptr noalias %w, ptr noalias %out, ptr noalias %bias, i64 %begin, i64 %end, i64 %K, i64 %part) #0 {{
entry:
  %has.bias = icmp ne ptr %bias, null
  %ahead = mul i64 %K, {LANES}
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %strip, label %done
strip:
  %n = phi i64 [%begin, %entry], [%n.next, %strip.end]
  %row0 = mul i64 %n, %K
{joined(f"  %row{i} = add i64 %row{i - 1}, %K" for i in range(1, LANES))}
  br label %piece
piece:
  %p = phi i64 [0, %strip], [%p.next, %piece.end]
  %total = phi <16 x float> [zeroinitializer, %strip], [%total.next, %piece.end]
  %p.next = add i64 %p, %part
  %p.end = call i64 @llvm.smin.i64(i64 %p.next, i64 %K)
  br label %chain
chain:
  %c = phi i64 [%p, %piece], [%c.next, %chain.end]
  %sum = phi <16 x float> [zeroinitializer, %piece], [%sum.next, %chain.end]
  %c.next = add i64 %c, {CHAIN}
  %c.end = call i64 @llvm.smin.i64(i64 %c.next, i64 %p.end)
  br label %tile
tile:
  %k = phi i64 [%c, %chain], [%k.next, %tile]
  %acc = phi <16 x float> [zeroinitializer, %chain], [{total}, %tile]
{joined(_load(i) for i in range(LANES))}
{joined(transposing)}
{joined(dots)}
  %k.next = add i64 %k, {TILE}
  %k.more = icmp slt i64 %k.next, %c.end
  br i1 %k.more, label %tile, label %chain.end
chain.end:
  %sum.next = fadd <16 x float> {total}, %sum
  %c.more = icmp slt i64 %c.next, %p.end
  br i1 %c.more, label %chain, label %piece.end
piece.end:
  %p.first = icmp eq i64 %p, 0
  %p.sum = fadd <16 x float> %total, %sum.next
  %total.next = select i1 %p.first, <16 x float> %sum.next, <16 x float> %p.sum
  %p.more = icmp slt i64 %p.next, %K
  br i1 %p.more, label %piece, label %strip.sum
strip.sum:
  br i1 %has.bias, label %strip.bias, label %strip.end
strip.bias:
  %bias.at = getelementptr i16, ptr %bias, i64 %n
  %bias.half = load <16 x i16>, ptr %bias.at, align 2
  %bias.low = zext <16 x i16> %bias.half to <16 x i32>
  %bias.bits = shl <16 x i32> %bias.low, {filled("i32 16")}
  %bias.float = bitcast <16 x i32> %bias.bits to <16 x float>
  %biased = fadd <16 x float> %total.next, %bias.float
  br label %strip.end
strip.end:
  %result = phi <16 x float> [%total.next, %strip.sum], [%biased, %strip.bias]
  %rounded = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %result)
  %to = getelementptr i16, ptr %out, i64 %n
  store <16 x bfloat> %rounded, ptr %to, align 2
  %n.next = add i64 %n, {LANES}
  %n.more = icmp slt i64 %n.next, %end
  br i1 %n.more, label %strip, label %done
done:
  ret void
}}
attributes #0 = {{ nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }}
"""


def _load(i: int) -> str:
    """32 numbers of the strip's row i, and a hint to fetch those of the same place in the next strip."""
    return f"""\
  %o{i} = add i64 %k, %row{i}
  %p{i} = getelementptr i16, ptr %w, i64 %o{i}
  %r{i} = load <16 x i32>, ptr %p{i}, align 2
  %q{i} = getelementptr i16, ptr %p{i}, i64 %ahead
  call void @llvm.prefetch.p0(ptr %q{i}, i32 0, i32 2, i32 1)"""


def _dots(pairs: list[str]) -> tuple[list[str], str]:
    """16 steps of the running sum; returns the lines and the name of its last value."""
    lines, acc = [], "%acc"
    for j, pair in enumerate(pairs):
        lines.append(f"""\
  %xo{j} = add i64 %k, {2 * j}
  %xp{j} = getelementptr i16, ptr %x, i64 %xo{j}
  %xs{j} = load i32, ptr %xp{j}, align 2
  %xi{j} = insertelement <16 x i32> poison, i32 %xs{j}, i64 0
  %xv{j} = shufflevector <16 x i32> %xi{j}, <16 x i32> poison, <16 x i32> zeroinitializer
  %xb{j} = bitcast <16 x i32> %xv{j} to <32 x bfloat>
  %wb{j} = bitcast <16 x i32> {pair} to <32 x bfloat>
  %d{j} = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <16 x float> {acc}, <32 x bfloat> %xb{j}, <32 x bfloat> %wb{j})""")
        acc = f"%d{j}"
    return lines, acc
