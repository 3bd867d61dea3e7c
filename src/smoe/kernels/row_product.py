"""The product of one row and a bf16 matrix, with oneDNN's bits at the speed of memory.

Decoding multiplies one row with every matrix, so each weight is used once, and memory bandwidth is the limit. oneDNN
(torch's CPU library) reaches half of it, because it first copies the matrix into another layout, as it would for many
rows. Here 16 rows of weights are transposed in registers instead:

    memory: W [N, K], row by row                registers: 16 x 16 pairs of weights, transposed
    row n    | k k+1 | k+2 k+3 | ...     ->     pair k      of rows n .. n+15      dot x[k, k+1]
    row n+1  | k k+1 | ...                      pair k+2    of rows n .. n+15      dot x[k+2, k+3]
    ...                                         ...         each lane is one output

Grade E0 requires torch's bits, which depend on the order of sums. oneDNN's order (brgemm, AVX-512 BF16) was found by
experiments. For every output there is one running sum over k in steps of two, which restarts every 512 k; the sums of
these chains are added in sequence. With several rows it restarts every 1024 k if K exceeds 1024. With few outputs and
large K, each thread sums a part of the k, and the parts are added at the end.

This kernel uses the same instruction in the same order. When a model is loaded, its bits are compared with torch's on
the model's own weights (`spinning_pool.py`); if they differ, torch computes. The weights `AHEAD` elements further, in
these rows or in the next 16, are prefetched, because rows of 768 elements are too short for hardware prefetchers.
Measurements are in docs/log/kernels.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smoe.kernels.isa import read_once_locality
from smoe.kernels.registers import filled, joined, transposed

if TYPE_CHECKING:
    import torch

LANES = 16
"""The number of outputs that are computed together: the 32-bit lanes of one register."""
TILE = 32
"""The number of elements along K in one step: the bf16 numbers of one register."""
AHEAD = 512
"""The distance between computation and prefetch, in elements along K. For 16 rows these are 16 KB, a part of the
first-level cache."""
CHAIN = 512
"""The number of elements along K after which the running sum of a single row restarts."""
_LEAST_WEIGHTS = 16**3
"""For products with at most this number of multiplications, torch uses another library than oneDNN."""


def fits(matrix: torch.Tensor) -> bool:
    """Return whether the kernel supports a matrix [K, N]: a bf16 CPU tensor that is contiguous along K, with a
    supported shape."""
    import torch

    columns, rows = matrix.shape
    is_rows = matrix.stride() == (1, columns) and matrix.dtype is torch.bfloat16 and matrix.device.type == "cpu"
    return is_rows and fits_shape(columns, rows)


def fits_shape(columns: int, outputs: int) -> bool:
    """Return whether the kernel supports a matrix of this shape that is stored row by row."""
    return columns % TILE == 0 and outputs % LANES == 0 and outputs * columns > _LEAST_WEIGHTS


def chain_of(columns: int, rows: int) -> int:
    """Return the number of elements along K after which torch restarts a running sum, when it multiplies `rows` rows of
    `columns` elements."""
    return 2 * CHAIN if rows > 1 and columns > 2 * CHAIN else CHAIN


def source(several: bool) -> str:
    """Return the LLVM text of the kernel: for one row, and with `several` also for two and for four rows at once.

    `row_product(x, w, out, bias, begin, end, K, part, length)` computes the outputs from `begin` to `end` - 1 of one
    row. It does so in strips of 16 outputs, and along K in parts of `part`, chains of `length` and tiles of 32
    elements. `bias` may be null; torch adds it before rounding. `row_product_2` and `row_product_4` have a pointer to
    (x, out) of every row instead of x and out, and no bias.
    """
    return DECLARATIONS + _one_row() + (_some_rows(2) + _some_rows(4) if several else "")


DECLARATIONS = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i64 @llvm.smin.i64(i64, i64)
attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }
"""


def _one_row() -> str:
    return f"""
define internal void @row_product(
    ptr noalias %x0, ptr noalias %w, ptr noalias %out0, ptr noalias %bias, i64 %begin, i64 %end, i64 %K, i64 %part,
    i64 %length) #0 {{
entry:
  %has.bias = icmp ne ptr %bias, null
  %far = mul i64 %K, {LANES - 1}
  %wrapped = add i64 %far, {AHEAD}
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %strip, label %done
{_sums(1)}
strip.sum:
  br i1 %has.bias, label %strip.bias, label %strip.end
strip.bias:
  %bias.at = getelementptr i16, ptr %bias, i64 %n
  %bias.half = load <16 x i16>, ptr %bias.at, align 2
  %bias.low = zext <16 x i16> %bias.half to <16 x i32>
  %bias.bits = shl <16 x i32> %bias.low, {filled("i32 16")}
  %bias.float = bitcast <16 x i32> %bias.bits to <16 x float>
  %biased = fadd <16 x float> %total.next.0, %bias.float
  br label %strip.end
strip.end:
  %result.0 = phi <16 x float> [%total.next.0, %strip.sum], [%biased, %strip.bias]
{_end(["%result.0"])}
"""


def _some_rows(rows: int) -> str:
    """Return the LLVM text of the function for several activation rows. Weights are transposed in registers once for
    all rows, because transposing takes longer than multiplying."""
    pointers = [f"{name}{r}" for r in range(rows) for name in ("x", "out")]
    loads = [
        f"  %{name}.at = getelementptr ptr, ptr %pairs, i64 {n}\n  %{name} = load ptr, ptr %{name}.at"
        for n, name in enumerate(pointers)
    ]
    return f"""
define internal void @row_product_{rows}(
    ptr noalias %pairs, ptr noalias %w, i64 %begin, i64 %end, i64 %K, i64 %part, i64 %length) #0 {{
entry:
{joined(loads)}
  %far = mul i64 %K, {LANES - 1}
  %wrapped = add i64 %far, {AHEAD}
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %strip, label %done
{_sums(rows)}
strip.sum:
  br label %strip.end
strip.end:
{_end([f"%total.next.{r}" for r in range(rows)])}
"""


def _sums(rows: int) -> str:
    """Return LLVM text that computes the sums of a strip of 16 outputs, one register per activation row:
    `%total.next.0` and so on."""
    transposing, pairs = transposed([f"%r{i}" for i in range(LANES)], "i32")
    each, zero = range(rows), "<16 x float> [zeroinitializer"
    dots = [line for r in each for line in _dots(pairs, r)]
    last = [f"%d{r}.{len(pairs) - 1}" for r in each]
    return f"""\
strip:
  %n = phi i64 [%begin, %entry], [%n.next, %strip.end]
  %row0 = mul i64 %n, %K
{joined(f"  %row{i} = add i64 %row{i - 1}, %K" for i in range(1, LANES))}
  br label %piece
piece:
  %p = phi i64 [0, %strip], [%p.next, %piece.end]
{joined(f"  %total.{r} = phi {zero}, %strip], [%total.next.{r}, %piece.end]" for r in each)}
  %p.next = add i64 %p, %part
  %p.end = call i64 @llvm.smin.i64(i64 %p.next, i64 %K)
  br label %chain
chain:
  %c = phi i64 [%p, %piece], [%c.next, %chain.end]
{joined(f"  %sum.{r} = phi {zero}, %piece], [%sum.next.{r}, %chain.end]" for r in each)}
  %c.next = add i64 %c, %length
  %c.end = call i64 @llvm.smin.i64(i64 %c.next, i64 %p.end)
  br label %tile
tile:
  %k = phi i64 [%c, %chain], [%k.next, %tile]
{joined(f"  %acc.{r} = phi {zero}, %chain], [{last[r]}, %tile]" for r in each)}
  %k.ahead = add i64 %k, {AHEAD}
  %k.wraps = icmp sge i64 %k.ahead, %K
  %ahead = select i1 %k.wraps, i64 %wrapped, i64 {AHEAD}
{joined(_load(i) for i in range(LANES))}
{joined(transposing)}
{joined(dots)}
  %k.next = add i64 %k, {TILE}
  %k.more = icmp slt i64 %k.next, %c.end
  br i1 %k.more, label %tile, label %chain.end
chain.end:
{joined(f"  %sum.next.{r} = fadd <16 x float> {last[r]}, %sum.{r}" for r in each)}
  %c.more = icmp slt i64 %c.next, %p.end
  br i1 %c.more, label %chain, label %piece.end
piece.end:
  %p.first = icmp eq i64 %p, 0
{joined(f"  %p.sum.{r} = fadd <16 x float> %total.{r}, %sum.next.{r}" for r in each)}
{joined(_first_or_sum(r) for r in each)}
  %p.more = icmp slt i64 %p.next, %K
  br i1 %p.more, label %piece, label %strip.sum"""


def _first_or_sum(r: int) -> str:
    return f"  %total.next.{r} = select i1 %p.first, <16 x float> %sum.next.{r}, <16 x float> %p.sum.{r}"


def _end(results: list[str]) -> str:
    """Return LLVM text that stores the rounded results of a strip of 16 outputs, and continues with the next strip."""
    stores = [
        f"""\
  %rounded.{r} = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> {result})
  %to.{r} = getelementptr i16, ptr %out{r}, i64 %n
  store <16 x bfloat> %rounded.{r}, ptr %to.{r}, align 2"""
        for r, result in enumerate(results)
    ]
    return f"""\
{joined(stores)}
  %n.next = add i64 %n, {LANES}
  %n.more = icmp slt i64 %n.next, %end
  br i1 %n.more, label %strip, label %done
done:
  ret void
}}"""


def _load(i: int) -> str:
    """Return LLVM text that loads 32 elements of row `i` of a strip (16 rows of weights), and prefetches the elements
    `AHEAD` further in the same row."""
    return f"""\
  %o{i} = add i64 %k, %row{i}
  %p{i} = getelementptr i16, ptr %w, i64 %o{i}
  %r{i} = load <16 x i32>, ptr %p{i}, align 2
  %q{i} = getelementptr i16, ptr %p{i}, i64 %ahead
  call void @llvm.prefetch.p0(ptr %q{i}, i32 0, i32 {read_once_locality()}, i32 1)"""


def _dots(pairs: list[str], r: int) -> list[str]:
    """Return LLVM text for 16 steps of the running sum of activation row `r`."""
    lines, acc = [], f"%acc.{r}"
    for j, pair in enumerate(pairs):
        name = f"{r}.{j}"
        lines.append(f"""\
  %xo{name} = add i64 %k, {2 * j}
  %xp{name} = getelementptr i16, ptr %x{r}, i64 %xo{name}
  %xs{name} = load i32, ptr %xp{name}, align 2
  %xi{name} = insertelement <16 x i32> poison, i32 %xs{name}, i64 0
  %xv{name} = shufflevector <16 x i32> %xi{name}, <16 x i32> poison, <16 x i32> zeroinitializer
  %xb{name} = bitcast <16 x i32> %xv{name} to <32 x bfloat>
  %wb{name} = bitcast <16 x i32> {pair} to <32 x bfloat>
  %d{name} = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <16 x float> {acc}, <32 x bfloat> %xb{name}, <32 x bfloat> %wb{name})""")
        acc = f"%d{name}"
    return lines
