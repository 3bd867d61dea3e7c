"""The memory budget as arithmetic: nothing lost, nothing over, refused exactly where it cannot work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.errors import BudgetError
from smoe.policy.budget import MAX_STAGING_SLOTS, MIN_STAGING_SLOTS, Demand, allocate, full_bytes, minimum_bytes
from smoe.units import format_bytes


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    top_k = draw(st.integers(1, 16))
    return Demand(
        weights_bytes=draw(st.integers(0, 10**10)),
        workspace_bytes=draw(st.integers(0, 10**9)),
        kv_cache_bytes=draw(st.integers(0, 10**10)),
        slot_bytes=4096 * draw(st.integers(1, 10**5)),
        top_k=top_k,
        total_experts=draw(st.integers(top_k, 2000)),
        read_buffer_bytes=draw(st.integers(0, 10**8)),
        predictor_bytes=draw(st.integers(0, 10**8)),
    )


extra = st.integers(0, 10**12)


@given(demand=demands(), more=extra)
def test_entries_add_up_and_stay_inside(demand: Demand, more: int) -> None:
    """Would catch a part that is forgotten, counted twice, or rounded up past the budget."""
    ledger = allocate(minimum_bytes(demand) + more, demand)
    assert sum(ledger.entries().values()) == ledger.total_bytes <= ledger.budget_bytes
    assert list(ledger.entries().values())[:3] == [demand.weights_bytes, demand.workspace_bytes, demand.kv_cache_bytes]
    assert demand.top_k <= ledger.cache_slots <= demand.total_experts
    assert MIN_STAGING_SLOTS <= ledger.staging_slots <= MAX_STAGING_SLOTS
    assert ledger.resident_share == ledger.cache_slots / demand.total_experts
    left = ledger.budget_bytes - ledger.total_bytes
    assert left < demand.slot_bytes or ledger.cache_slots == demand.total_experts, "a slot that would fit is not used"


@given(demand=demands())
def test_the_minimum_is_the_least_that_works(demand: Demand) -> None:
    least = minimum_bytes(demand)
    ledger = allocate(least, demand)
    assert (ledger.cache_slots, ledger.staging_slots) == (demand.top_k, MIN_STAGING_SLOTS)
    for budget in (least - 1, least // 2, 0):
        with pytest.raises(BudgetError):
            allocate(budget, demand)


@given(demand=demands())
def test_the_full_budget_holds_every_expert(demand: Demand) -> None:
    assert allocate(full_bytes(demand), demand).cache_slots == demand.total_experts


@given(demand=demands(), budgets=st.tuples(extra, extra))
def test_more_memory_is_never_less_room(demand: Demand, budgets: tuple[int, int]) -> None:
    """Would catch a staging share that eats the cache slot it was taken from: more memory, fewer residents."""
    smaller, larger = (allocate(minimum_bytes(demand) + more, demand) for more in sorted(budgets))
    assert smaller.cache_slots <= larger.cache_slots
    assert smaller.staging_slots <= larger.staging_slots


DEMAND = Demand(3 * 2**30, 200 * 2**20, 700 * 2**20, 9 * 2**20 + 4096, 8, 768)


def test_the_refusal_names_every_part_and_what_to_do() -> None:
    with pytest.raises(BudgetError) as refusal:
        allocate(2**30, DEMAND)
    text = str(refusal.value)
    for part in ("non-expert weights", "workspace", "KV cache", "staging (2 experts)", "expert slots (top-k = 8)"):
        assert part in text
    amounts = [2**30, DEMAND.weights_bytes, DEMAND.workspace_bytes, DEMAND.kv_cache_bytes, minimum_bytes(DEMAND)]
    for amount in [*amounts, 2 * DEMAND.slot_bytes, 8 * DEMAND.slot_bytes]:
        assert format_bytes(amount) in text
    for switch in ("`memory`", "`context_tokens`", "`max_sequences`"):
        assert switch in text


def test_each_claim_costs_what_it_says() -> None:
    """One byte more of anything raises the minimum by that byte."""
    for name in ("weights_bytes", "workspace_bytes", "kv_cache_bytes", "read_buffer_bytes", "predictor_bytes"):
        grown = replace(DEMAND, **{name: getattr(DEMAND, name) + 1})
        assert minimum_bytes(grown) == minimum_bytes(DEMAND) + 1
    assert minimum_bytes(replace(DEMAND, top_k=9)) == minimum_bytes(DEMAND) + DEMAND.slot_bytes


@pytest.mark.parametrize(("slots", "staging"), [(10, 2), (59, 2), (60, 3), (100, 5), (400, 8)])
def test_staging_takes_a_twentieth_within_its_bounds(slots: int, staging: int) -> None:
    fixed = minimum_bytes(DEMAND) - (DEMAND.top_k + MIN_STAGING_SLOTS) * DEMAND.slot_bytes
    ledger = allocate(fixed + slots * DEMAND.slot_bytes, DEMAND)
    assert (ledger.staging_slots, ledger.cache_slots) == (staging, slots - staging)
