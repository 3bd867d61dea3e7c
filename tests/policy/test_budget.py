"""The memory budget as arithmetic: nothing lost, nothing over, refused exactly where it cannot work."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.errors import BudgetError
from smoe.expert import LOW
from smoe.policy.budget import (
    MAX_STAGING_SLOTS,
    MIN_STAGING_SLOTS,
    Demand,
    SlotClass,
    allocate,
    budget_for_share,
    full_bytes,
    minimum_bytes,
    slot_classes,
)
from smoe.policy.residency import PoolSize
from smoe.units import format_bytes


@st.composite
def slot_class(draw: st.DrawFn, layers: tuple[int, ...] = ()) -> SlotClass:
    top_k = draw(st.integers(1, 16))
    return SlotClass(4096 * draw(st.integers(1, 10**5)), top_k, draw(st.integers(top_k, 2000)), layers)


@st.composite
def demands(draw: st.DrawFn, most_classes: int = 3) -> Demand:
    """Of experts of up to three sizes; of every other, low copies of one or two sizes as well."""
    lows = draw(st.integers(0, 2))
    return Demand(
        low=tuple(draw(slot_class((layer,)))._replace(form=LOW) for layer in range(lows)),
        low_share=draw(st.floats(0.01, 0.9)) if lows else 0.0,
        weights_bytes=draw(st.integers(10**5, 10**10)),
        workspace_bytes=draw(st.integers(0, 10**9)),
        kv_cache_bytes=draw(st.integers(0, 10**10)),
        classes=tuple(draw(slot_class((layer,))) for layer in range(draw(st.integers(1, most_classes)))),
        read_buffer_bytes=draw(st.integers(0, 10**8)),
        predictor_bytes=draw(st.integers(0, 10**8)),
        embedding_bytes=draw(st.sampled_from([0, 10**5])),
        position_bytes=draw(st.integers(0, 10**6)),
        square_bytes=draw(st.integers(0, 100)),
        step_tokens=draw(st.sampled_from([0, 7, 2048])),
    )


extra = st.integers(0, 10**12)


@given(demand=demands(), more=extra)
def test_entries_add_up_and_stay_inside(demand: Demand, more: int) -> None:
    """Would catch a part that is forgotten, counted twice, or rounded up past the budget."""
    ledger = allocate(minimum_bytes(demand) + more, demand)
    assert sum(ledger.entries().values()) == ledger.total_bytes <= ledger.budget_bytes
    workspace = demand.workspace_bytes + demand.step_bytes(demand.step_tokens)
    assert list(ledger.entries().values())[:3] == [ledger.weights_bytes, workspace, demand.kv_cache_bytes]
    for pool, each in zip(ledger.pools, demand.all_classes, strict=True):
        assert each.top_k <= pool.cache <= each.experts
        assert MIN_STAGING_SLOTS <= pool.staging <= MAX_STAGING_SLOTS
        assert (pool.layers, pool.form) == (each.layers, each.form)
    assert ledger.resident_share == ledger.cache_slots / demand.total_experts
    left = ledger.budget_bytes - ledger.total_bytes
    most = sum(each.slot_bytes for each in demand.all_classes)
    assert left < most or ledger.cache_slots == demand.total_experts, "a slot that would fit is not used"


@given(demand=demands(), more=extra, used=st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted))
def test_what_is_lent_fits_beside_what_is_used(demand: Demand, more: int, used: list[float]) -> None:
    """Would catch slots that take memory that is in use, and a loan that costs residents."""
    demand = replace(demand, low=(), low_share=0.0)
    ledger = allocate(minimum_bytes(demand) + more, demand)
    others = ledger.total_bytes - demand.slots_bytes([pool.cache for pool in ledger.pools]) - demand.reserve_bytes
    little, much = (int(share * demand.reserve_bytes) for share in used)
    for taken in (little, much, demand.reserve_bytes):
        slots = ledger.slots_after(taken)
        assert others + taken + demand.slots_bytes(slots) <= ledger.budget_bytes
        assert all(
            pool.cache <= n <= each.experts for pool, n, each in zip(ledger.pools, slots, demand.classes, strict=True)
        )
    assert all(a >= b for a, b in zip(ledger.slots_after(little), ledger.slots_after(much), strict=True))
    lent = ledger.lending()
    assert lent.entries() == ledger.entries()
    assert [pool.cache + pool.spare for pool in lent.pools] == ledger.slots_after(0)


@given(demand=demands(), more=extra)
def test_an_embedding_is_kept_where_everything_fits(demand: Demand, more: int) -> None:
    ledger = allocate(minimum_bytes(demand) + more, demand)
    is_whole = ledger.budget_bytes >= full_bytes(demand)
    assert ledger.weights_bytes == demand.weights_bytes - (0 if is_whole else demand.embedding_bytes)
    assert ledger.embedding_on_disk is (demand.embedding_bytes > 0 and not is_whole)


@given(demand=demands())
def test_the_minimum_is_the_least_that_works(demand: Demand) -> None:
    least = minimum_bytes(demand)
    ledger = allocate(least, demand)
    assert [(pool.cache, pool.staging) for pool in ledger.pools] == [
        (each.top_k, MIN_STAGING_SLOTS) for each in demand.all_classes
    ]
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
    for less, more in zip(smaller.pools, larger.pools, strict=True):
        assert less.cache <= more.cache
        assert less.staging <= more.staging


@given(demand=demands(), room=st.floats(0, 1))
def test_every_size_keeps_the_same_part_of_its_experts(demand: Demand, room: float) -> None:
    """Beyond the least, up to a slot, and no less than its share of the bytes: would catch a size that takes what
    others need, and one whose leavings nobody gets."""
    demand = replace(demand, low=(), low_share=0.0)
    least = minimum_bytes(demand)
    ledger = allocate(least + int(room * (full_bytes(demand) - least)), demand)
    lowest, highest = 0.0, float("inf")
    for pool, each in zip(ledger.pools, demand.classes, strict=True):
        if pool.cache == each.experts:
            continue
        slots, lacking = pool.cache + pool.staging - each.least, each.most - each.least
        assert slots >= room * lacking - 1.001
        lowest, highest = max(lowest, slots / lacking), min(highest, (slots + 1) / lacking)
    assert lowest <= highest + 1e-6, "one part for all"


@given(demand=demands(), share=st.floats(0.01, 1))
def test_the_budget_for_a_share_is_the_smallest(demand: Demand, share: float) -> None:
    wanted = math.ceil(share * demand.total_experts - 1e-9)
    if wanted < sum(each.top_k for each in demand.classes):
        with pytest.raises(BudgetError, match="one token uses"):
            budget_for_share(share, demand)
        return
    budget = budget_for_share(share, demand)
    assert allocate(budget, demand).cache_slots >= wanted
    assert budget == minimum_bytes(demand) or allocate(budget - 1, demand).cache_slots < wanted


@given(demand=demands().filter(lambda demand: bool(demand.low)), room=st.floats(0, 1))
def test_low_copies_get_their_share(demand: Demand, room: float) -> None:
    """Of the bytes of all slots, up to one slot of each size; more only where a token needs it, less only where they
    are all here or the others have their least."""
    least = minimum_bytes(demand)
    ledger = allocate(least + int(room * (full_bytes(demand) - least)), demand)
    on_disk = demand.embedding_bytes if ledger.embedding_on_disk else 0
    slots = ledger.budget_bytes - demand.fixed_bytes + on_disk
    pools = list(zip(ledger.pools, demand.all_classes, strict=True))
    own, low = ([(pool, each) for pool, each in pools if is_low is (each.form == LOW)] for is_low in (False, True))
    taken = sum((pool.cache + pool.staging) * each.slot_bytes for pool, each in low)
    share = demand.low_share * slots
    if taken > share:
        assert all(pool.cache == each.top_k for pool, each in low)
    if taken <= share - sum(each.slot_bytes for _, each in low) - 1:
        have_all = all(pool.cache == each.experts for pool, each in low)
        others = sum(each.least * each.slot_bytes for _, each in own)
        assert have_all or others > (1 - demand.low_share) * slots - 1
    assert ledger.low_slots == sum(pool.cache for pool, _ in low)
    assert ledger.cache_slots == sum(pool.cache for pool, _ in own)


def test_low_copies_by_hand() -> None:
    """100 slots' worth: a fifth is 20 of them, which are 80 of the low copies."""
    low = SlotClass(4096, 2, 500, (0,), LOW)
    demand = Demand(0, 0, 0, (SlotClass(4 * 4096, 2, 500, (0,)),), low=(low,), low_share=0.2)
    ledger = allocate(100 * 4 * 4096, demand)
    assert ledger.pools == (PoolSize(76, 4, (0,)), PoolSize(76, 4, (0,), LOW))
    assert ledger.entries()["slots of low copies"] == 76 * 4096
    assert ledger.entries()["staging"] == 4 * 5 * 4096
    assert ledger.sizes == [(80, 4 * 4096), (80, 4096)]


def test_no_byte_more_is_less_room() -> None:
    """Byte by byte, with slots of a few bytes: would catch low copies whose next slot costs the others one."""
    low = (SlotClass(5, 2, 40, (0, 1), LOW),)
    demand = Demand(100, 10, 10, (SlotClass(17, 2, 20, (0,)), SlotClass(11, 2, 20, (1,))), low=low, low_share=0.3)
    before: tuple[int, ...] = (0, 0, 0)
    for budget in range(minimum_bytes(demand), full_bytes(demand) + 1):
        cache = tuple(pool.cache for pool in allocate(budget, demand).pools)
        assert all(old <= new for old, new in zip(before, cache, strict=True)), (budget, before, cache)
        before = cache
    assert before[:2] == (20, 20)


def alone(slot_bytes: int, layers: int) -> dict[int, SlotClass]:
    return {layer: SlotClass(slot_bytes + layer, 2 + layer, 8) for layer in range(layers)}


def test_layers_of_like_size_share_slots() -> None:
    """Would catch a class for every layer whose file offsets differ, or slots too small for one of their layers."""
    large, small = slot_classes({0: 950, 1: 500, 2: 1000, 3: 480}, alone(4096, 4))
    assert large == SlotClass(4098, 4, 16, (0, 2)) and small == SlotClass(4099, 5, 16, (1, 3))
    (one,) = slot_classes({0: 1000, 1: 1000, 2: 1000}, alone(4096, 3))
    assert one.layers == (0, 1, 2)


DEMAND = Demand(3 * 2**30, 200 * 2**20, 700 * 2**20, (SlotClass(9 * 2**20 + 4096, 8, 768),))


def test_the_refusal_names_every_part_and_what_to_do() -> None:
    with pytest.raises(BudgetError) as refusal:
        allocate(2**30, DEMAND)
    text = str(refusal.value)
    for part in ("non-expert weights", "workspace", "KV cache", "staging (2 experts)", "expert slots (top-k = 8)"):
        assert part in text
    amounts = [2**30, DEMAND.weights_bytes, DEMAND.workspace_bytes, DEMAND.kv_cache_bytes, minimum_bytes(DEMAND)]
    for amount in [*amounts, 2 * DEMAND.slot_bytes, 8 * DEMAND.slot_bytes]:
        assert format_bytes(amount) in text
    for switch in ("`memory=3.97GiB`", "`context_tokens`", "`max_sequences`", "`prefill_tokens`"):
        assert switch in text


def test_each_claim_costs_what_it_says() -> None:
    """One byte more of anything raises the minimum by that byte."""
    for name in ("weights_bytes", "workspace_bytes", "kv_cache_bytes", "read_buffer_bytes", "predictor_bytes"):
        grown = replace(DEMAND, **{name: getattr(DEMAND, name) + 1})
        assert minimum_bytes(grown) == minimum_bytes(DEMAND) + 1
    assert (
        minimum_bytes(replace(DEMAND, classes=(DEMAND.classes[0]._replace(top_k=9),)))
        == minimum_bytes(DEMAND) + DEMAND.slot_bytes
    )


@pytest.mark.parametrize(("slots", "staging"), [(10, 2), (59, 2), (60, 3), (100, 5), (400, 8)])
def test_staging_takes_a_twentieth_within_its_bounds(slots: int, staging: int) -> None:
    fixed = minimum_bytes(DEMAND) - (DEMAND.top_k + MIN_STAGING_SLOTS) * DEMAND.slot_bytes
    ledger = allocate(fixed + slots * DEMAND.slot_bytes, DEMAND)
    assert (ledger.staging_slots, ledger.cache_slots) == (staging, slots - staging)
