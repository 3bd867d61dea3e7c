"""Computes RMSNorm of a few rows in one function with torch's bits, where transformers uses eight operations.

    mean    =    (x0 * x0 + x1 * x1 + ...) / size        float32
    out     =    bf16(weight * bf16(x * (1 / sqrt(mean + eps))))

Everything except the sum is a sequence of single roundings, so only the order of torch's sum must be reproduced. torch
reads a row in registers of 8 numbers, even on CPUs with wider ones, and adds them to four accumulators:

    register       0  1  2  3  4  5  6  7  8 ...
    accumulator    0  1  2  3  0  1  2  3  0 ...        up to three remaining registers go to the first

After every 16 registers, each accumulator is added to a sum of its own and reset. At the end each accumulator is added
to its sum, then the four sums to each other in order, and then the 8 lanes one by one. Rows longer than 8192 would need
a second level of such sums. A row of 2048 numbers takes 0.6 us. Before the kernel is used, its bits are compared with
torch's on the same machine (`fastpath/norm.py`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from smoe.kernels.jit import Source, compile_functions
from smoe.kernels.registers import as_bf16, broadcast, halved, joined, widened

LONGEST = 8192
"""The length of the longest supported row. torch sums longer rows in another order."""
_LANES = 16
_SUM_LANES = 8
_ACCUMULATORS = 4
_ROUND = 16
"""The number of registers after which an accumulator is reset."""
_TOGETHER = _ACCUMULATORS * _SUM_LANES


def fits(size: int) -> bool:
    """Return whether the RMSNorm kernel supports rows of `size` numbers."""
    return 0 < size <= LONGEST and size % _LANES == 0


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm of every row of x [..., size], times weight [size], in bf16. Rows are contiguous, and there is
    at least one."""
    out, size = torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    _function()(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps)
    return out


@functools.cache
def _function() -> Callable[..., None]:
    """Return the machine code, compiled once per process, as a function f(x, weight, out, rows, size, epsilon)."""
    pointer, number = ctypes.c_void_p, ctypes.c_longlong
    signature = (pointer, pointer, pointer, number, number, ctypes.c_float)
    (function,) = compile_functions(Source(source), {"rms_norm": signature})
    return function


def source() -> str:
    """Return the LLVM text of the RMSNorm kernel."""
    return _ROWS + _mean_of_squares() + _WEIGH


_ROWS = """
declare float @llvm.sqrt.f32(float)

define void @rms_norm(ptr %x, ptr %weight, ptr %out, i64 %rows, i64 %size, float %eps) #0 {
entry:
  br label %row
row:
  %n = phi i64 [0, %entry], [%n.next, %row]
  %offset = mul i64 %n, %size
  %from = getelementptr i16, ptr %x, i64 %offset
  %to = getelementptr i16, ptr %out, i64 %offset
  %mean = call float @mean_of_squares(ptr %from, i64 %size)
  %variance = fadd float %mean, %eps
  %deviation = call float @llvm.sqrt.f32(float %variance)
  %scale = fdiv float 1.0, %deviation
  call void @weigh(ptr %from, ptr %weight, ptr %to, i64 %size, float %scale)
  %n.next = add i64 %n, 1
  %more = icmp slt i64 %n.next, %rows
  br i1 %more, label %row, label %done
done:
  ret void
}
attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }
"""


def _mean_of_squares() -> str:
    """Return LLVM text that computes the mean of squares in torch's order. `low` are the accumulators, `high` the sums
    to which they are added."""
    each = range(_ACCUMULATORS)
    vector = f"<{_SUM_LANES} x float>"
    return f"""
declare float @llvm.vector.reduce.fadd.v{_SUM_LANES}f32(float, {vector})

define internal float @mean_of_squares(ptr noalias %x, i64 %size) #0 {{
entry:
  %whole = and i64 %size, -{_TOGETHER}
  %any = icmp sgt i64 %whole, 0
  br i1 %any, label %together, label %rest
together:
  %i = phi i64 [0, %entry], [%i.next, %together]
{joined(f"  %low{k} = phi {vector} [zeroinitializer, %entry], [%low{k}.next, %together]" for k in each)}
{joined(f"  %high{k} = phi {vector} [zeroinitializer, %entry], [%high{k}.next, %together]" for k in each)}
{joined(f"  %i{k} = add i64 %i, {k * _SUM_LANES}" for k in each)}
{joined(_square(f"{k}", f"%i{k}") for k in each)}
  %i.next = add i64 %i, {_TOGETHER}
  %in.round = and i64 %i.next, {_ROUND * _TOGETHER - 1}
  %is.round = icmp eq i64 %in.round, 0
{joined(_add(k, vector) for k in each)}
  %more = icmp slt i64 %i.next, %whole
  br i1 %more, label %together, label %rest
rest:
{joined(_last(k, vector) for k in each)}
{joined(f"  %sum{k} = fadd {vector} %high{k}.last, %low{k}.last" for k in each)}
  br label %look
look:
  %r = phi i64 [%whole, %rest], [%r.next, %left]
  %first = phi {vector} [%sum0, %rest], [%first.next, %left]
  %is.left = icmp slt i64 %r, %size
  br i1 %is.left, label %left, label %total
left:
{_square("left", "%r")}
  %first.next = fadd {vector} %first, %square.left
  %r.next = add i64 %r, {_SUM_LANES}
  br label %look
total:
{joined(f"  %total{k} = fadd {vector} {f'%total{k - 1}' if k > 1 else '%first'}, %sum{k}" for k in each[1:])}
  %sum = call float @llvm.vector.reduce.fadd.v{_SUM_LANES}f32(float 0.0, {vector} %total{_ACCUMULATORS - 1})
  %count = sitofp i64 %size to float
  %mean = fdiv float %sum, %count
  ret float %mean
}}
"""


def _square(name: str, at: str) -> str:
    """Return LLVM text for `%square.name`: the squares of a register of x, from element `at` on."""
    return f"""\
  %at.{name} = getelementptr i16, ptr %x, i64 {at}
  %bits.{name} = load <{_SUM_LANES} x i16>, ptr %at.{name}, align 2
{widened(f"bits.{name}", f"x.{name}", _SUM_LANES)}
  %square.{name} = fmul <{_SUM_LANES} x float> %x.{name}, %x.{name}"""


def _add(k: int, vector: str) -> str:
    """Return LLVM text that adds squares to accumulator `k`, and after 16 registers moves the accumulator to its
    sum."""
    return f"""\
  %low{k}.more = fadd {vector} %low{k}, %square.{k}
  %high{k}.more = fadd {vector} %high{k}, %low{k}.more
  %low{k}.next = select i1 %is.round, {vector} zeroinitializer, {vector} %low{k}.more
  %high{k}.next = select i1 %is.round, {vector} %high{k}.more, {vector} %high{k}"""


def _last(k: int, vector: str) -> str:
    return f"""\
  %low{k}.last = phi {vector} [zeroinitializer, %entry], [%low{k}.next, %together]
  %high{k}.last = phi {vector} [zeroinitializer, %entry], [%high{k}.next, %together]"""


_WEIGH = f"""
define internal void @weigh(
    ptr noalias %x, ptr noalias %weight, ptr noalias %out, i64 %size, float %scale) #0 {{
entry:
{broadcast("scale", "%scale")}
  br label %strip
strip:
  %i = phi i64 [0, %entry], [%i.next, %strip]
  %x.at = getelementptr i16, ptr %x, i64 %i
  %x.bits = load <{_LANES} x i16>, ptr %x.at, align 2
{widened("x.bits", "x.wide", _LANES)}
  %scaled = fmul <{_LANES} x float> %x.wide, %scale.all
{as_bf16("scaled", "normal", _LANES)}
  %weight.at = getelementptr i16, ptr %weight, i64 %i
  %weight.bits = load <{_LANES} x i16>, ptr %weight.at, align 2
{widened("weight.bits", "weight.wide", _LANES)}
  %product = fmul <{_LANES} x float> %weight.wide, %normal
{as_bf16("product", "near", _LANES)}
{halved("near", "result", _LANES)}
  %out.at = getelementptr i16, ptr %out, i64 %i
  store <{_LANES} x i16> %result, ptr %out.at, align 2
  %i.next = add i64 %i, {_LANES}
  %more = icmp slt i64 %i.next, %size
  br i1 %more, label %strip, label %done
done:
  ret void
}}
"""
"""The LLVM text of a function that multiplies each number by the row's scale and then by its weight. Both products are
rounded to bf16."""
