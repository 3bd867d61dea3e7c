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
