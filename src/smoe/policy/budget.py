"""The memory budget as a ledger: every byte has a name, what does not fit is refused before loading.

On a machine without a GPU the budget is RAM beside the interpreter and its libraries; on a GPU it is device memory.
Order of claims: non-expert weights, workspace, KV cache, what a predictor copies of weights, read buffers, staging (at
least two experts); all the rest is cache slots. The minimum number of cache slots is the top-k of the widest layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from smoe.errors import BudgetError
from smoe.units import format_bytes

MIN_STAGING_SLOTS = 2
MAX_STAGING_SLOTS = 8
STAGING_SHARE = 0.05
"""Staging takes this share of what is left for experts, within the two bounds above."""


@dataclass(frozen=True)
class Demand:
    """What a model asks of the budget, in bytes unless said otherwise."""

    weights_bytes: int
    """Non-expert weights and buffers, tied weights once."""
    workspace_bytes: int
    """Activations of the largest step and the logits of the last position."""
    kv_cache_bytes: int
    """Reserved at context x sequences."""
    slot_bytes: int
    """One expert slot, alignment included."""
    top_k: int
    """Experts one token of one layer uses."""
    total_experts: int
    """Routed experts of all layers."""
    read_buffer_bytes: int = 0
    """Buffers of the reading threads, where experts cannot be read straight into their slots."""
    predictor_bytes: int = 0
    """What a predictor keeps of weights: a second copy of the routers."""

    @property
    def fixed_bytes(self) -> int:
        """Everything that does not depend on the number of slots."""
        return sum(self.fixed_entries().values())

    def fixed_entries(self) -> dict[str, int]:
        """The fixed parts by name, in order of claim."""
        entries = {
            "non-expert weights": self.weights_bytes,
            "workspace": self.workspace_bytes,
            "KV cache": self.kv_cache_bytes,
        }
        others = {"stacked routers": self.predictor_bytes, "read buffers": self.read_buffer_bytes}
        return entries | {name: count for name, count in others.items() if count}


@dataclass(frozen=True)
class Ledger:
    """A budget that works: entries add up to at most `budget_bytes`."""

    budget_bytes: int
    demand: Demand
    cache_slots: int
    staging_slots: int

    def entries(self) -> dict[str, int]:
        """Bytes by name, in order of claim."""
        demand = self.demand
        return demand.fixed_entries() | {
            "staging": self.staging_slots * demand.slot_bytes,
            "expert slots": self.cache_slots * demand.slot_bytes,
        }

    @property
    def total_bytes(self) -> int:
        return sum(self.entries().values())

    @property
    def resident_share(self) -> float:
        """Share of all routed experts that fit the cache slots."""
        return self.cache_slots / self.demand.total_experts


def allocate(budget_bytes: int, demand: Demand) -> Ledger:
    """Divide the budget; raises `BudgetError` with the ledger and the smallest budget that would work."""
    slots = max(0, budget_bytes - demand.fixed_bytes) // demand.slot_bytes
    staging = _staging(slots)
    cache = min(slots - staging, demand.total_experts)
    if cache < demand.top_k:
        allowed = f"at least {minimum_bytes(demand)} bytes"
        raise BudgetError(_refusal(budget_bytes, demand), setting="memory_bytes", given=budget_bytes, allowed=allowed)
    return Ledger(budget_bytes, demand, cache, staging)


def budget_for_share(share: float, demand: Demand) -> int:
    """The smallest budget that keeps `share` (above 0, at most 1) of all routed experts in cache slots.

    Raises `BudgetError` for a share that is less than the experts of one token.
    """
    wanted = math.ceil(share * demand.total_experts - 1e-9)
    if wanted < demand.top_k:
        least = math.ceil(1000 * demand.top_k / demand.total_experts) / 10
        raise BudgetError(
            f"`resident_share` {100 * share:.3g}% of {demand.total_experts} experts is {wanted}, and one token uses "
            f"{demand.top_k} of a layer; ask for {least:.1f}% or more",
            setting="resident_share",
            given=share,
            allowed=f"at least {least / 100:.4g}",
        )
    possible = range(wanted + MIN_STAGING_SLOTS, wanted + MAX_STAGING_SLOTS + 1)
    slots = next(slots for slots in possible if slots - _staging(slots) >= wanted)
    return demand.fixed_bytes + slots * demand.slot_bytes


def minimum_bytes(demand: Demand) -> int:
    """The smallest budget with which the model can run at all."""
    return demand.fixed_bytes + (demand.top_k + MIN_STAGING_SLOTS) * demand.slot_bytes


def full_bytes(demand: Demand) -> int:
    """The budget with which every expert is resident."""
    return demand.fixed_bytes + (demand.total_experts + MAX_STAGING_SLOTS) * demand.slot_bytes


def _staging(slots: int) -> int:
    """How many of all slots only let experts pass."""
    return min(MAX_STAGING_SLOTS, max(MIN_STAGING_SLOTS, int(slots * STAGING_SHARE)))


def _refusal(budget_bytes: int, demand: Demand) -> str:
    needed = demand.fixed_entries() | {
        f"staging ({MIN_STAGING_SLOTS} experts)": MIN_STAGING_SLOTS * demand.slot_bytes,
        f"expert slots (top-k = {demand.top_k})": demand.top_k * demand.slot_bytes,
    }
    lines = [f"  {name:<28}{format_bytes(count):>12}" for name, count in needed.items()]
    return "\n".join(
        [
            f"a budget of {format_bytes(budget_bytes)} cannot hold this model; the least it needs is",
            *lines,
            f"  {'together':<28}{format_bytes(minimum_bytes(demand)):>12}",
            "give more with `memory`, or ask for less with `context_tokens` or `max_sequences`",
        ]
    )
