"""The gated activation and the weighted sum of experts' outputs, with torch's bits.

Elementwise bf16 arithmetic has one rounding, so only the order of sums must equal torch's. The activation function
itself uses exponentials, whose bits differ between libraries. It is therefore a table of all 65536 bf16 numbers, which
torch computes.

    wide [n, 2I]:  gate | up        inner = bf16(table[gate] * up)            n experts, one row each
    rows [n, H]                     out = bf16(out + bf16(rows[i] * gains[i])), i ascending, from +0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from smoe.kernels.registers import as_bf16, broadcast, halved, widened

if TYPE_CHECKING:
    import torch

LANES = 16
_VALUES = 1 << 16
_PROOF_ROWS = 8


ApplyGate: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
"""The activation function of an experts module: from [n, 2I] to [n, I]."""


def activation_table(apply_gate: ApplyGate) -> torch.Tensor | None:
    """Return the activation's value for every bf16 number, bf16 [65536], or None if `apply_gate` does not compute
    f(gate) * up for a function f."""
    import torch

    gates = _all_numbers()
    table = apply_gate(torch.cat([gates, torch.ones_like(gates)]).unsqueeze(0))[0].clone()
    return table if is_table_of(table, apply_gate, _PROOF_ROWS) else None


def is_table_of(table: torch.Tensor, apply_gate: ApplyGate, rows: int = 1) -> bool:
    """Return whether `apply_gate` computes table[gate] * up. Every bf16 number is tested as gate, each with `rows`
    values of up."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ups = torch.randint(_VALUES, (rows, _VALUES), generator=generator).to(torch.uint16).view(torch.bfloat16)
    theirs = apply_gate(torch.cat([_all_numbers().expand_as(ups), ups], dim=1))
    ours = (table.float() * ups.float()).to(torch.bfloat16)
    return torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def _all_numbers() -> torch.Tensor:
    import torch

    return torch.arange(_VALUES).to(torch.uint16).view(torch.bfloat16)


def source() -> str:
    """Return the LLVM text of `gate(wide, table, inner, I, begin, end)` and `combine(rows, gains, out, count, H, begin,
    end)`.

    Both compute the outputs from `begin` to `end` - 1; `combine` computes 16 at a time. They round with integer
    arithmetic, because the conversion instruction flushes subnormal numbers to zero and torch does not.
    """
    return f"\n{_gate()}\n\n{_combine()}\n"


def _gate() -> str:
    return f"""\
define internal void @gate(
    ptr noalias %wide, ptr noalias %table, ptr noalias %inner, i64 %I, i64 %begin, i64 %end) {{
entry:
  br label %element
element:
  %i = phi i64 [%begin, %entry], [%i.next, %element]
  %gate.at = getelementptr i16, ptr %wide, i64 %i
  %gate.bits = load i16, ptr %gate.at, align 2
  %gate = zext i16 %gate.bits to i64
  %active.at = getelementptr i16, ptr %table, i64 %gate
  %active.bits = load i16, ptr %active.at, align 2
  %up.at = getelementptr i16, ptr %gate.at, i64 %I
  %up.bits = load i16, ptr %up.at, align 2
{widened("active.bits", "active", 1)}
{widened("up.bits", "up", 1)}
  %product = fmul float %active, %up
{as_bf16("product", "near", 1)}
{halved("near", "result", 1)}
  %inner.at = getelementptr i16, ptr %inner, i64 %i
  store i16 %result, ptr %inner.at, align 2
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %end
  br i1 %more, label %element, label %done
done:
  ret void
}}"""


def _combine() -> str:
    return f"""\
define internal void @combine(
    ptr noalias %rows, ptr noalias %gains, ptr noalias %out, i64 %count, i64 %H, i64 %begin, i64 %end) #0 {{
entry:
  br label %strip
strip:
  %i = phi i64 [%begin, %entry], [%i.next, %strip.end]
  br label %row
row:
  %n = phi i64 [0, %strip], [%n.next, %row]
  %sum = phi <{LANES} x float> [zeroinitializer, %strip], [%next, %row]
  %row.begin = mul i64 %n, %H
  %at = add i64 %row.begin, %i
  %y.at = getelementptr i16, ptr %rows, i64 %at
  %y.bits = load <{LANES} x i16>, ptr %y.at, align 2
{widened("y.bits", "y", LANES)}
  %gain.at = getelementptr float, ptr %gains, i64 %n
  %gain.value = load float, ptr %gain.at
{broadcast("gain", "%gain.value")}
  %weighted = fmul <{LANES} x float> %y, %gain.all
{as_bf16("weighted", "part", LANES)}
  %total = fadd <{LANES} x float> %sum, %part
{as_bf16("total", "next", LANES)}
  %n.next = add i64 %n, 1
  %n.more = icmp slt i64 %n.next, %count
  br i1 %n.more, label %row, label %strip.end
strip.end:
{halved("next", "result", LANES)}
  %out.at = getelementptr i16, ptr %out, i64 %i
  store <{LANES} x i16> %result, ptr %out.at, align 2
  %i.next = add i64 %i, {LANES}
  %i.more = icmp slt i64 %i.next, %end
  br i1 %i.more, label %strip, label %done
done:
  ret void
}}"""
