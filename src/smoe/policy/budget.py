"""Divides the memory budget into named entries, the ledger, and refuses a budget that is too small before anything is
loaded.

On a machine without a GPU, the budget is RAM in addition to the interpreter and its libraries. On a GPU it is device
memory. Entries get their bytes in this order: non-expert weights, workspace, KV cache, a predictor's copies of weights,
read buffers, staging slots (at least two). What remains becomes cache slots. Their minimum is the top-k of the widest
layer.

Workspace and KV cache are reserved for the largest step and the longest texts. Their unused part can be lent to experts
(`Ledger.lending`): the pools then have *spare* slots, which are in use only while the reserved memory is not.

If layers have experts of different sizes, as in a file of several formats, there are slots of several sizes. Each size,
a *slot class*, gets the minimum that its layers need and a part of the remaining bytes, so that all classes can hold
the same fraction of their experts.

Low-precision copies (HOBBIT) have slot classes of their own. They get a given fraction of the bytes for slots, but at
least what one token needs.
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
from smoe.units import enough_to_type, format_bytes

BLOCK_TOKENS = 128
"""The number of positions in a block of the KV cache, in which its memory is counted. A block covers whole pages if a
head has at least 16 numbers."""
MIN_STAGING_SLOTS = 2
MAX_STAGING_SLOTS = 8
STAGING_SHARE = 0.05
"""The fraction of the expert slots that are staging slots, within the bounds declared above."""
_PARTS = 1 << 32
"""The number of steps in which `_pools` raises the number of slots of a class from its minimum to its maximum. It is so
large that every number of slots between the two occurs."""
_MOST_PARTS = _PARTS * 32
"""The largest value of the argument `part` of `_pools`. Above `_PARTS`, the number of staging slots still grows."""
_ALIKE = 1 / 16
"""Layers share a slot class if their experts differ by less than this fraction in size. A class of its own would need
two more staging slots, and other layers could not use its slots."""


class SlotClass(NamedTuple):
    """Slots of one size, and the layers that use them."""

    slot_bytes: int
    """Bytes of one slot, including alignment."""
    top_k: int
    """The largest number of experts of one of these layers that a token uses."""
    experts: int
    """The number of routed experts in these layers."""
    layers: tuple[int, ...] = ()
    """The layers, ascending; empty: all layers."""
    form: int = EXACT
    """The format of the copies in these slots: full (`EXACT`) or low."""
    passing: int | None = None
    """Only for systems without an expert cache (DuoServe-MoE, OD-MoE): the number of slots in addition to one token's
    choice. None: as many slots as the budget allows."""

    @property
    def least(self) -> int:
        """The smallest number of slots of this class with which a token can be computed."""
        return self.top_k + (MIN_STAGING_SLOTS if self.passing is None else self.passing)

    @property
    def most(self) -> int:
        """The number of slots with which every expert of these layers is resident. More slots have no use."""
        return self.experts + MAX_STAGING_SLOTS if self.passing is None else self.least


def slot_classes(expert_bytes: Mapping[int, int], layers: Mapping[int, SlotClass]) -> tuple[SlotClass, ...]:
    """Return the slot classes of a model, the largest slots first. Layers with experts of similar size share a class.

    `expert_bytes`: bytes of one expert's weights, by layer. `layers`: the class that each layer would have by itself.
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
    """The memory that a model needs, in bytes unless stated otherwise."""

    weights_bytes: int
    """Bytes of non-expert weights and buffers; tied weights count once."""
    workspace_bytes: int
    """Bytes of a step's temporary tensors that do not depend on the number of positions, such as the logits of the last
    position."""
    kv_cache_bytes: int
    """Bytes of the KV cache for the largest number of sequences, each with the longest context."""
    classes: tuple[SlotClass, ...]
    """The slot classes of full copies."""
    read_buffer_bytes: int = 0
    """Bytes of the reading threads' buffers, if experts cannot be read directly into their slots."""
    embedding_bytes: int = 0
    """Bytes of the input embedding, if it can stay on disk: a token needs only one of its rows."""
    predictor_bytes: int = 0
    """Bytes of weights that a predictor holds: a second copy of the routers, or corrected ones."""
    learned_bytes: int = 0
    """Bytes of values that were learned about the model: a fitted predictor, or the parameters of the eviction
    `learned`."""
    draft_bytes: int = 0
    """Bytes of a draft model: its experts, activations and KV cache; it shares the model's other weights."""
    low: tuple[SlotClass, ...] = ()
    """The slot classes of low-precision copies; empty if there are no low-precision copies."""
    low_share: float = 0.0
    """The fraction of the bytes for slots that low-precision copies get."""
    position_bytes: int = 0
    """Bytes of activations for each position of a step."""
    square_bytes: int = 0
    """Bytes of activations for each pair of positions, if attention computes a score for each pair."""
    step_tokens: int = 0
    """The largest number of positions of one step."""
    context_tokens: int = 0
    """The largest number of positions of one text; 0: unknown."""
    kv_position_bytes: int = 0
    """Bytes of the KV cache for each position."""
    kv_positions: int = 0
    """The number of positions of the KV cache, of all sequences together."""
    image_encoder_bytes: int = 0
    """Bytes of the weights of the image encoder; 0 without images."""
    latent_bytes: int = 0
    """Bytes of copies of weights with which single tokens attend to a latent KV cache."""
    image_step_bytes: int = 0
    """Bytes of activations of the image encoder for the largest image. They are in use between steps only."""

    def step_bytes(self, positions: int) -> int:
        """Return the bytes of activations of a step with `positions` positions. A text longer than `step_tokens` takes
        several steps."""
        positions = min(positions, self.step_tokens)
        return positions * self.position_bytes + positions * positions * self.square_bytes

    @property
    def reserve_bytes(self) -> int:
        """Bytes of workspace and KV cache that only the largest step and the longest texts use completely."""
        return self.kv_cache_bytes + self.largest_step_bytes

    @property
    def largest_step_bytes(self) -> int:
        """Bytes of activations of the largest step, or of the image encoder for the largest image if these are more."""
        return max(self.step_bytes(self.step_tokens), self.image_step_bytes)

    @property
    def all_classes(self) -> tuple[SlotClass, ...]:
        """The slot classes of full copies, followed by those of low-precision copies."""
        return self.classes + self.low

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest slot."""
        return max(each.slot_bytes for each in self.classes)

    @property
    def top_k(self) -> int:
        """The largest number of experts of one layer that a token uses."""
        return max(each.top_k for each in self.classes)

    @property
    def total_experts(self) -> int:
        """The number of routed experts in all layers."""
        return sum(each.experts for each in self.classes)

    @property
    def experts_bytes(self) -> int:
        """Bytes of slots for all routed experts."""
        return sum(each.experts * each.slot_bytes for each in self.classes)

    def slots_bytes(self, slots: Sequence[int]) -> int:
        """Return the bytes of slots. `slots`: the number of slots of each of `all_classes`."""
        return sum(count * each.slot_bytes for count, each in zip(slots, self.all_classes, strict=True))

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of slots."""
        return sum(self.fixed_entries().values())

    def fixed_entries(self, embedding_on_disk: bool = False) -> dict[str, int]:
        """Return {name: bytes} of the budget's entries that do not depend on the number of slots, in the order in which
        they get memory."""
        entries = {
            "non-expert weights": self.weights_bytes - (self.embedding_bytes if embedding_on_disk else 0),
            "workspace": self.workspace_bytes + self.largest_step_bytes,
            "KV cache": self.kv_cache_bytes,
        }
        others = {
            "image encoder": self.image_encoder_bytes,
            "latent attention": self.latent_bytes,
            "predictor": self.predictor_bytes,
            "learned": self.learned_bytes,
            "draft model": self.draft_bytes,
            "read buffers": self.read_buffer_bytes,
        }
        return entries | {name: count for name, count in others.items() if count}


@dataclass(frozen=True)
class Ledger:
    """A memory budget divided into entries, whose sum is at most `budget_bytes`."""

    budget_bytes: int
    demand: Demand
    pools: tuple[PoolSize, ...]
    """The number of slots of each of `demand.all_classes`."""

    @property
    def embedding_on_disk(self) -> bool:
        """Whether the input embedding stays on disk. It stays there if the model does not fit in memory completely,
        because memory for experts then saves more time."""
        return self.demand.embedding_bytes > 0 and self.budget_bytes < full_bytes(self.demand)

    @property
    def weights_bytes(self) -> int:
        """Bytes of non-expert weights in memory."""
        return self._fixed_entries["non-expert weights"]

    @property
    def dense_bytes(self) -> int:
        """Bytes of all weights in memory that are not the routed experts': those of the language model and those of the
        image encoder."""
        return self.weights_bytes + self.demand.image_encoder_bytes

    @property
    def _fixed_entries(self) -> dict[str, int]:
        return self.demand.fixed_entries(self.embedding_on_disk)

    def lending(self) -> Ledger:
        """Return the same ledger with spare slots. They use the memory of workspace and KV cache while that memory is
        unused."""
        most = self.slots_after(0)
        pools = (pool._replace(spare=slots - pool.cache) for pool, slots in zip(self.pools, most, strict=True))
        return replace(self, pools=tuple(pools))

    def slots_after(self, reserve_bytes: int) -> list[int]:
        """Return the number of cache slots of each pool while `reserve_bytes` bytes of the reserved memory are in use.
        No number is below that of the same ledger without spare slots."""
        assert not self.demand.low, "low copies have a share of their own"
        lent = max(0, self.demand.reserve_bytes - reserve_bytes)
        room = self.budget_bytes - sum(self._fixed_entries.values()) + lent
        more = zip(self.pools, share_out(room, self.demand.classes), strict=True)
        classes = zip(more, self.demand.classes, strict=True)
        return [
            max(pool.cache, min(found.cache + found.staging - pool.staging, each.experts))
            for (pool, found), each in classes
        ]

    def slots_of_text(self, tokens: int) -> int:
        """Return the number of cache slots for full copies while the last token of a text of `tokens` tokens is
        decoded, and no other text is in the KV cache."""
        if self.most_slots == self.cache_slots:
            return self.cache_slots
        demand = self.demand
        unused = demand.kv_positions - backed_positions(min(tokens, demand.context_tokens), demand.context_tokens)
        used = demand.kv_cache_bytes - unused * demand.kv_position_bytes
        return sum(self.slots_after(used + demand.step_bytes(1)))

    @property
    def slots_in_use(self) -> list[range]:
        """For each pool, the numbers of its slots, without the spare slots."""
        begins = accumulate((slots for slots, _ in self.sizes), initial=0)
        return [
            range(first, first + pool.cache + pool.staging) for first, pool in zip(begins, self.pools, strict=False)
        ]

    @property
    def most_slots(self) -> int:
        """The number of cache slots for full copies while the reserved memory is unused."""
        return self.cache_slots + sum(pool.spare for pool in self.pools)

    @property
    def most_experts_bytes(self) -> int:
        """Bytes of these `most_slots` slots."""
        pools = zip(self.pools, self.demand.all_classes, strict=True)
        return sum((pool.cache + pool.spare) * each.slot_bytes for pool, each in pools if pool.form == EXACT)

    @property
    def cache_slots(self) -> int:
        """The number of cache slots for full copies."""
        return sum(pool.cache for pool in self.pools if pool.form == EXACT)

    @property
    def low_slots(self) -> int:
        """The number of cache slots for low-precision copies."""
        return sum(pool.cache for pool in self.pools if pool.form != EXACT)

    @property
    def staging_slots(self) -> int:
        return sum(pool.staging for pool in self.pools)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(number of slots, bytes of each) by class; cache, staging and spare slots are counted together."""
        pools = zip(self.pools, self.demand.all_classes, strict=True)
        return [(pool.cache + pool.staging + pool.spare, each.slot_bytes) for pool, each in pools]

    def entries(self) -> dict[str, int]:
        """Return {name: bytes} of all entries of the budget, in the order in which they get memory."""
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
        """The fraction of all routed experts that fit in the cache slots."""
        return self.cache_slots / self.demand.total_experts

    @property
    def holds_all(self) -> bool:
        """Whether all routed experts fit in the cache slots."""
        return self.cache_slots >= self.demand.total_experts

    @property
    def residents(self) -> str:
        """A phrase for people: how many experts fit in the cache slots, always and while the reserved memory is
        unused."""
        low = f" and {self.low_slots} low copies" if self.low_slots else ""
        experts = f"{self.cache_slots} of {self.demand.total_experts} experts{low}"
        always, more = "", ""
        if self.most_slots > self.cache_slots:
            always, more = "always ", f", up to {self.most_slots} until a long text needs the memory"
        return f"{experts} {always}fit in memory ({self.resident_share:.0%}){more}{self._beside}"

    @property
    def spare(self) -> str:
        """A phrase for people, in place of `residents`, for a cluster whose workers compute all experts while any
        worker is connected."""
        return (
            f"no experts resident while workers are connected (room for {self.cache_slots} without them){self._beside}"
        )

    @property
    def _beside(self) -> str:
        return f", with a draft model of {format_bytes(self.demand.draft_bytes)}" if self.demand.draft_bytes else ""


def backed_positions(tokens: int, capacity_tokens: int) -> int:
    """Return the number of positions of one sequence that have memory if `tokens` of its `capacity_tokens` positions
    are in use."""
    # the extra block is for sequences that begin within a page
    blocks = -(-tokens // BLOCK_TOKENS) + bool(capacity_tokens % BLOCK_TOKENS)
    return min(blocks * BLOCK_TOKENS, capacity_tokens)


def allocate(budget_bytes: int, demand: Demand) -> Ledger:
    """Return the ledger of a budget of `budget_bytes`. Raise `BudgetError`, with the entries and the smallest possible
    budget, if the model does not fit."""
    on_disk = demand.embedding_bytes if budget_bytes < full_bytes(demand) else 0
    room = budget_bytes - demand.fixed_bytes + on_disk
    for_low = min(int(demand.low_share * room), room - least_bytes(demand.classes))
    # not rounded to whole slots: otherwise one more byte of budget could take many bytes from full copies
    for_low = min(max(least_bytes(demand.low), for_low), most_bytes(demand.low))
    pools = share_out(room - for_low, demand.classes) + share_out(for_low, demand.low)
    if any(pool.cache < each.top_k for pool, each in zip(pools, demand.all_classes, strict=True)):
        allowed = f"at least {minimum_bytes(demand)} bytes"
        raise BudgetError(_refusal(budget_bytes, demand), setting="memory_bytes", given=budget_bytes, allowed=allowed)
    return Ledger(budget_bytes, demand, pools)


def share_out(room: int, classes: Sequence[SlotClass]) -> tuple[PoolSize, ...]:
    """Return the number of slots of each class that fit in `room` bytes.

    Each class gets its minimum, and the same fraction of the further slots that it can use. Bytes that one class cannot
    use go to the other classes. If the minimum of all classes does not fit, every number is 0.
    """
    if room < least_bytes(classes):
        return tuple(PoolSize(0, 0, each.layers, each.form) for each in classes)

    def needed(part: int) -> int:
        pools = zip(_pools(part, classes), classes, strict=True)
        return sum((pool.cache + pool.staging) * each.slot_bytes for pool, each in pools)

    return _pools(bisect_right(range(_MOST_PARTS + 1), room, key=needed) - 1, classes)


def _pools(part: int, classes: Sequence[SlotClass]) -> tuple[PoolSize, ...]:
    """Return the number of slots of each class: its minimum, and the fraction `part` / `_PARTS` of the slots between
    minimum and maximum, at most one for each expert. No number falls as `part` grows."""
    pools = []
    for each in classes:
        slots = each.least + part * (each.most - each.least) // _PARTS
        staging = _staging(slots) if each.passing is None else each.passing
        pools.append(PoolSize(min(slots - staging, each.experts), staging, each.layers, each.form))
    return tuple(pools)


def budget_for_share(share: float, demand: Demand) -> int:
    """Return the smallest budget in bytes whose cache slots hold the fraction `share` (above 0, at most 1) of all
    routed experts. Raise `BudgetError` if that is less than the experts of one token."""
    wanted, fewest = math.ceil(share * demand.total_experts - 1e-9), sum(each.top_k for each in demand.classes)
    if wanted < fewest:
        least = math.ceil(1000 * fewest / demand.total_experts) / 10
        raise BudgetError(
            f"`resident_share={100 * share:.3g}%` of {demand.total_experts} experts is {wanted} experts, and one "
            f"token uses {fewest} in a layer{_each_size(demand)}; give {least:.1f}% or more",
            setting="resident_share",
            given=share,
            allowed=f"at least {least / 100:.4g}",
        )
    possible = range(minimum_bytes(demand), full_bytes(demand) + 1)
    return possible[bisect_left(possible, wanted, key=lambda budget: allocate(budget, demand).cache_slots)]


def least_bytes(classes: Sequence[SlotClass]) -> int:
    """Return the bytes of the fewest slots with which a token can be computed."""
    return sum(each.least * each.slot_bytes for each in classes)


def most_bytes(classes: Sequence[SlotClass]) -> int:
    """Return the bytes of as many slots as make every expert resident."""
    return sum(each.most * each.slot_bytes for each in classes)


def minimum_bytes(demand: Demand) -> int:
    """Return the smallest budget in bytes with which the model can run."""
    return demand.fixed_bytes - demand.embedding_bytes + least_bytes(demand.all_classes)


def full_bytes(demand: Demand) -> int:
    """Return the smallest budget in bytes with which every expert is resident."""
    own, low = most_bytes(demand.classes), most_bytes(demand.low)
    share = int(own * demand.low_share / (1 - demand.low_share))
    return demand.fixed_bytes + own + max(min(low, share), least_bytes(demand.low))


def _staging(slots: int) -> int:
    """Return how many of `slots` slots of one class are staging slots."""
    return min(MAX_STAGING_SLOTS, max(MIN_STAGING_SLOTS, int(slots * STAGING_SHARE)))


def _each_size(demand: Demand) -> str:
    return "" if len(demand.classes) == 1 else f" of each of {len(demand.classes)} sizes"


def _refusal(budget_bytes: int, demand: Demand) -> str:
    """Return why a model does not fit, the entries of the smallest budget, and that budget as it is typed."""
    table = f"a budget of {format_bytes(budget_bytes)} cannot hold this model; {least_entries(demand)}"
    return f"{table}\ngive `memory={enough_to_type(minimum_bytes(demand))}` or more{less_to_ask(demand)}"


def less_to_ask(demand: Demand) -> str:
    """Return the end of a message about a budget that is too small: the context for which the smallest budget has room,
    and the settings that need less memory."""
    room = f" (for a context of {demand.context_tokens} tokens)" if demand.context_tokens else ""
    draft = ", or leave out the draft model (another `prefetch` or `preset`)" if demand.draft_bytes else ""
    return f"{room}, or ask for less with `context_tokens`, `max_sequences` or `prefill_tokens`{draft}"


def least_entries(demand: Demand) -> str:
    """Return the entries of the smallest budget with which the model can run, as the lines of a table."""
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
            "the least it needs is",
            *lines,
            f"  {'together':<{width}}{format_bytes(minimum_bytes(demand)):>12}",
        ]
    )
