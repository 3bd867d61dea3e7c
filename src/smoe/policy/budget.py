"""Divides the memory budget into named entries (a ledger), and refuses a budget that is too small before loading.

On a machine without a GPU the budget is RAM in addition to the interpreter and its libraries; on a GPU it is device
memory. Order of claims: non-expert weights, workspace, KV cache, a predictor's copies of weights, read buffers, staging
(at least two experts); the rest is cache slots. The minimum number of cache slots is the top-k of the widest layer.

Workspace and KV cache are reserved for the largest step and the longest texts. Their unused part can be lent to experts
(`Ledger.lending`): the pools then have *spare* slots, which are used only while the reserve is not.

Layers whose experts differ in size, as in a file of several formats, have slots of several sizes. Each size, a *slot
class*, gets the minimum that its layers need and a share of the rest, so that all classes hold the same part of their
experts.

Low copies (HOBBIT) have slot classes of their own, which get a given share of the remaining bytes, at least what a
token needs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from smoe.errors import BudgetError
from smoe.expert import EXACT
from smoe.policy.residency import PoolSize
from smoe.units import format_bytes

MIN_STAGING_SLOTS = 2
MAX_STAGING_SLOTS = 8
STAGING_SHARE = 0.05
"""The share of the expert slots that are staging slots, within the two bounds above."""
_PARTS = 1 << 32
"""The resolution at which missing slots are divided among classes: so fine that every number of slots occurs."""
_MOST_PARTS = _PARTS * 32
"""The upper bound of `part` in `_pools`: beyond `_PARTS`, staging slots still grow."""
_ALIKE = 1 / 16
"""Layers whose experts differ by less than this share use the same slots: another class would need two more staging
slots, and other layers could not use its slots."""


class SlotClass(NamedTuple):
    """Slots of one size, and the layers that use them."""

    slot_bytes: int
    """Bytes of one slot, including alignment."""
    top_k: int
    """The maximum number of experts of one of these layers that a token uses."""
    experts: int
    """The number of routed experts in these layers."""
    layers: tuple[int, ...] = ()
    """The layers in ascending order; empty: all."""
    form: int = EXACT
    """The format of the copies."""
    passing: int | None = None
    """For systems without an expert cache (DuoServe-MoE, OD-MoE): the number of staging slots beyond one token's
    choice. None: as many slots as the budget allows."""

    @property
    def least(self) -> int:
        """The minimum number of slots with which a token can be computed."""
        return self.top_k + (MIN_STAGING_SLOTS if self.passing is None else self.passing)

    @property
    def most(self) -> int:
        """The number of slots with which every expert is resident."""
        return self.experts + MAX_STAGING_SLOTS if self.passing is None else self.least


def slot_classes(expert_bytes: Mapping[int, int], layers: Mapping[int, SlotClass]) -> tuple[SlotClass, ...]:
    """Return the slot classes of a model, the largest slots first.

    `expert_bytes`: bytes of an expert's weights by layer, which decide the grouping; `layers`: the class that each
    layer alone would have.
    """
    found: list[list[int]] = []
    for layer in sorted(layers, key=lambda n: (-expert_bytes[n], n)):
        if found and expert_bytes[layer] > (1 - _ALIKE) * expert_bytes[found[-1][0]]:
            found[-1].append(layer)
        else:
            found.append([layer])
    return tuple(
        SlotClass(
            max(layers[n].slot_bytes for n in members),
            max(layers[n].top_k for n in members),
            sum(layers[n].experts for n in members),
            tuple(sorted(members)),
        )
        for members in found
    )


@dataclass(frozen=True)
class Demand:
    """What a model needs of the memory budget, in bytes unless stated otherwise."""

    weights_bytes: int
    """Bytes of non-expert weights and buffers; tied weights count once."""
    workspace_bytes: int
    """Bytes of a step that do not depend on its positions, such as the logits of the last position."""
    kv_cache_bytes: int
    """Bytes reserved for context x sequences."""
    classes: tuple[SlotClass, ...]
    """The slot classes of full copies."""
    read_buffer_bytes: int = 0
    """Bytes of the reading threads' buffers, where experts cannot be read directly into their slots."""
    embedding_bytes: int = 0
    """Bytes of an input embedding that can stay on disk: a token needs one row of it."""
    predictor_bytes: int = 0
    """Bytes of weights that a predictor holds: a second copy of the routers, or corrected ones."""
    learned_bytes: int = 0
    """Bytes of what was learned about the model: a fitted predictor, an estimate of next uses."""
    draft_bytes: int = 0
    """Bytes of a draft model: its experts, activations and KV cache; it shares the model's other weights."""
    low: tuple[SlotClass, ...] = ()
    """The slot classes of low copies; empty: there are none."""
    low_share: float = 0.0
    """The share of the slots' bytes for low copies."""
    position_bytes: int = 0
    """Bytes of activations for each position of a step."""
    square_bytes: int = 0
    """Bytes of activations for each pair of positions, where attention computes a score for each pair."""
    step_tokens: int = 0
    """The maximum number of positions of one step."""

    def step_bytes(self, positions: int) -> int:
        """Return the bytes of activations of a step with `positions` positions; longer texts take several steps."""
        positions = min(positions, self.step_tokens)
        return positions * self.position_bytes + positions * positions * self.square_bytes

    @property
    def reserve_bytes(self) -> int:
        """Bytes of workspace and KV cache that only the largest step and the longest texts use."""
        return self.kv_cache_bytes + self.step_bytes(self.step_tokens)

    @property
    def all_classes(self) -> tuple[SlotClass, ...]:
        """All slot classes; those of low copies last."""
        return self.classes + self.low

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest slot."""
        return max(each.slot_bytes for each in self.classes)

    @property
    def top_k(self) -> int:
        """The maximum number of experts of one layer that a token uses."""
        return max(each.top_k for each in self.classes)

    @property
    def total_experts(self) -> int:
        """The number of routed experts in all layers."""
        return sum(each.experts for each in self.classes)

    @property
    def experts_bytes(self) -> int:
        """Bytes of all routed experts in slots."""
        return sum(each.experts * each.slot_bytes for each in self.classes)

    def slots_bytes(self, slots: Sequence[int]) -> int:
        """Return the bytes of `slots` slots of each class, those of low copies included."""
        return sum(count * each.slot_bytes for count, each in zip(slots, self.all_classes, strict=True))

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of slots."""
        return sum(self.fixed_entries().values())

    def fixed_entries(self, embedding_on_disk: bool = False) -> dict[str, int]:
        """Return the fixed entries by name, in order of claim."""
        entries = {
            "non-expert weights": self.weights_bytes - (self.embedding_bytes if embedding_on_disk else 0),
            "workspace": self.workspace_bytes + self.step_bytes(self.step_tokens),
            "KV cache": self.kv_cache_bytes,
        }
        others = {
            "predictor": self.predictor_bytes,
            "learned": self.learned_bytes,
            "draft model": self.draft_bytes,
            "read buffers": self.read_buffer_bytes,
        }
        return entries | {name: count for name, count in others.items() if count}


@dataclass(frozen=True)
class Ledger:
    """A memory budget divided into entries, which add up to at most `budget_bytes`."""

    budget_bytes: int
    demand: Demand
    pools: tuple[PoolSize, ...]
    """The slots of each of the demand's classes; those of low copies last."""

    @property
    def embedding_on_disk(self) -> bool:
        """Whether the input embedding stays on disk: where not everything fits, experts benefit more from memory."""
        return self.demand.embedding_bytes > 0 and self.budget_bytes < full_bytes(self.demand)

    @property
    def weights_bytes(self) -> int:
        """Bytes of non-expert weights in memory."""
        return self._fixed_entries["non-expert weights"]

    @property
    def _fixed_entries(self) -> dict[str, int]:
        return self.demand.fixed_entries(self.embedding_on_disk)

    def lending(self) -> Ledger:
        """Return the ledger with spare slots, which hold experts while workspace and KV cache are not used."""
        most = self.slots_after(0)
        pools = (pool._replace(spare=slots - pool.cache) for pool, slots in zip(self.pools, most, strict=True))
        return replace(self, pools=tuple(pools))

    def slots_after(self, reserve_bytes: int) -> list[int]:
        """Return the cache slots of each pool while `reserve_bytes` of the reserve are in use; never fewer than without
        lending."""
        assert not self.demand.low, "low copies have a share of their own"
        lent = max(0, self.demand.reserve_bytes - reserve_bytes)
        room = self.budget_bytes - sum(self._fixed_entries.values()) + lent
        more = zip(self.pools, share_out(room, self.demand.classes), strict=True)
        classes = zip(more, self.demand.classes, strict=True)
        return [
            max(pool.cache, min(found.cache + found.staging - pool.staging, each.experts))
            for (pool, found), each in classes
        ]

    @property
    def slots_in_use(self) -> list[range]:
        """The numbers of the slots that are not spare, for each pool."""
        begins = accumulate((slots for slots, _ in self.sizes), initial=0)
        return [
            range(first, first + pool.cache + pool.staging) for first, pool in zip(begins, self.pools, strict=False)
        ]

    @property
    def most_slots(self) -> int:
        """Cache slots for full copies while the reserve is unused."""
        return self.cache_slots + sum(pool.spare for pool in self.pools)

    @property
    def most_experts_bytes(self) -> int:
        """Bytes of full copies in `most_slots` slots."""
        pools = zip(self.pools, self.demand.all_classes, strict=True)
        return sum((pool.cache + pool.spare) * each.slot_bytes for pool, each in pools if pool.form == EXACT)

    @property
    def cache_slots(self) -> int:
        """Cache slots for full copies."""
        return sum(pool.cache for pool in self.pools if pool.form == EXACT)

    @property
    def low_slots(self) -> int:
        """Cache slots for low copies."""
        return sum(pool.cache for pool in self.pools if pool.form != EXACT)

    @property
    def staging_slots(self) -> int:
        return sum(pool.staging for pool in self.pools)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(slots, bytes of each) by class: cache, staging and spare slots together."""
        pools = zip(self.pools, self.demand.all_classes, strict=True)
        return [(pool.cache + pool.staging + pool.spare, each.slot_bytes) for pool, each in pools]

    def entries(self) -> dict[str, int]:
        """Return the bytes of each entry, in order of claim."""
        demand = self.demand
        entries = self._fixed_entries | {
            "staging": demand.slots_bytes([pool.staging for pool in self.pools]),
            "expert slots": demand.slots_bytes([pool.cache * (pool.form == EXACT) for pool in self.pools]),
        }
        low = demand.slots_bytes([pool.cache * (pool.form != EXACT) for pool in self.pools])
        return entries | {"slots of low copies": low} if low else entries

    @property
    def total_bytes(self) -> int:
        return sum(self.entries().values())

    @property
    def resident_share(self) -> float:
        """The share of all routed experts that fit the cache slots."""
        return self.cache_slots / self.demand.total_experts

    @property
    def residents(self) -> str:
        """A phrase that says how many experts fit the cache slots."""
        low = f" and {self.low_slots} low copies" if self.low_slots else ""
        residents_text = f"{self.cache_slots} of {self.demand.total_experts} experts{low}"
        more = (
            f", up to {self.most_slots} while reserved memory is not used" if self.most_slots > self.cache_slots else ""
        )
        return f"{residents_text} resident ({self.resident_share:.0%}){more}{self._beside}"

    @property
    def spare(self) -> str:
        """Return the phrase of `residents` for a cluster whose workers compute all experts while any worker is
        connected."""
        return (
            f"no experts resident while workers are connected (room for {self.cache_slots} without them){self._beside}"
        )

    @property
    def _beside(self) -> str:
        return f", with a draft model of {format_bytes(self.demand.draft_bytes)}" if self.demand.draft_bytes else ""


def allocate(budget_bytes: int, demand: Demand) -> Ledger:
    """Divide the budget. Raises `BudgetError` with the entries and the smallest possible budget."""
    on_disk = demand.embedding_bytes if budget_bytes < full_bytes(demand) else 0
    room = budget_bytes - demand.fixed_bytes + on_disk
    for_low = min(int(demand.low_share * room), room - least_bytes(demand.classes))
    # not rounded to whole slots: one byte more of budget could then take many bytes from the others
    for_low = min(max(least_bytes(demand.low), for_low), most_bytes(demand.low))
    pools = share_out(room - for_low, demand.classes) + share_out(for_low, demand.low)
    if any(pool.cache < each.top_k for pool, each in zip(pools, demand.all_classes, strict=True)):
        allowed = f"at least {minimum_bytes(demand)} bytes"
        raise BudgetError(_refusal(budget_bytes, demand), setting="memory_bytes", given=budget_bytes, allowed=allowed)
    return Ledger(budget_bytes, demand, pools)


def share_out(room: int, classes: Sequence[SlotClass]) -> tuple[PoolSize, ...]:
    """Return the slots of each class in `room` bytes: the minimum of each, and the same part of what each still lacks.
    What a class cannot use goes to the others. All are 0 where not even the minimum fits."""
    if room < least_bytes(classes):
        return tuple(PoolSize(0, 0, each.layers, each.form) for each in classes)

    def needed(part: int) -> int:
        pools = zip(_pools(part, classes), classes, strict=True)
        return sum((pool.cache + pool.staging) * each.slot_bytes for pool, each in pools)

    return _pools(bisect_right(range(_MOST_PARTS + 1), room, key=needed) - 1, classes)


def _pools(part: int, classes: Sequence[SlotClass]) -> tuple[PoolSize, ...]:
    """Return slots for each class: its minimum and `part` of `_PARTS` of what it lacks, at most all its experts. No
    class shrinks as `part` grows."""
    pools = []
    for each in classes:
        slots = each.least + part * (each.most - each.least) // _PARTS
        staging = _staging(slots) if each.passing is None else each.passing
        pools.append(PoolSize(min(slots - staging, each.experts), staging, each.layers, each.form))
    return tuple(pools)


def budget_for_share(share: float, demand: Demand) -> int:
    """Return the smallest budget in bytes that holds `share` (above 0, at most 1) of all routed experts in cache slots.

    Raises `BudgetError` for a share that is less than the experts of one token.
    """
    wanted, fewest = math.ceil(share * demand.total_experts - 1e-9), sum(each.top_k for each in demand.classes)
    if wanted < fewest:
        least = math.ceil(1000 * fewest / demand.total_experts) / 10
        raise BudgetError(
            f"`resident_share` {100 * share:.3g}% of {demand.total_experts} experts is {wanted}, and one token uses "
            f"{fewest} of a layer{_each_size(demand)}; ask for {least:.1f}% or more",
            setting="resident_share",
            given=share,
            allowed=f"at least {least / 100:.4g}",
        )
    possible = range(minimum_bytes(demand), full_bytes(demand) + 1)
    return possible[bisect_left(possible, wanted, key=lambda budget: allocate(budget, demand).cache_slots)]


def least_bytes(classes: Sequence[SlotClass]) -> int:
    """Return the bytes of the slots with which a token can be computed."""
    return sum(each.least * each.slot_bytes for each in classes)


def most_bytes(classes: Sequence[SlotClass]) -> int:
    """Return the bytes of the slots with which every expert is resident."""
    return sum(each.most * each.slot_bytes for each in classes)


def minimum_bytes(demand: Demand) -> int:
    """Return the smallest budget in bytes with which the model can run."""
    return demand.fixed_bytes - demand.embedding_bytes + least_bytes(demand.all_classes)


def full_bytes(demand: Demand) -> int:
    """Return the budget in bytes with which every expert is resident."""
    own, low = most_bytes(demand.classes), most_bytes(demand.low)
    share = int(own * demand.low_share / (1 - demand.low_share))
    return demand.fixed_bytes + own + max(min(low, share), least_bytes(demand.low))


def _staging(slots: int) -> int:
    """Return how many of `slots` slots are staging slots."""
    return min(MAX_STAGING_SLOTS, max(MIN_STAGING_SLOTS, int(slots * STAGING_SHARE)))


def _each_size(demand: Demand) -> str:
    return "" if len(demand.classes) == 1 else f" of each of {len(demand.classes)} sizes"


def _refusal(budget_bytes: int, demand: Demand) -> str:
    of_each = _each_size(demand)
    staging = [each.least - each.top_k for each in demand.all_classes]
    needed = demand.fixed_entries(embedding_on_disk=True) | {
        f"staging ({max(staging)} experts{of_each})": demand.slots_bytes(staging),
        f"expert slots (top-k = {demand.top_k}{of_each})": demand.slots_bytes(
            [each.top_k for each in demand.all_classes]
        ),
    }
    width = max(28, *(len(name) + 2 for name in needed))
    lines = [f"  {name:<{width}}{format_bytes(count):>12}" for name, count in needed.items()]
    return "\n".join(
        [
            f"a budget of {format_bytes(budget_bytes)} cannot hold this model; the least it needs is",
            *lines,
            f"  {'together':<{width}}{format_bytes(minimum_bytes(demand)):>12}",
            "give more with `memory`, or ask for less with `context_tokens`, `max_sequences` or `prefill_tokens`"
            + (", or leave out the draft model (another `prefetch` or `preset`)" if demand.draft_bytes else ""),
        ]
    )
