"""The plan types that policies produce and that engine and simulator execute.

A step of one layer has a list of *serves*, executed in order, and a list of *loads*, issued in order. `Load.after`
connects them: the load may start once that many serves of this plan have been computed, because it uses the slot of one
of them. Loads with `after == 0` start at once.

    serves   s0   s1   s2   s3   s4 ...
    loads    l0(after 0)  l1(after 0)  l2(after 2: takes the slot of s1) ...
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from smoe.expert import ExpertKey

DEVICE, HOST = 0, 1
"""Units that compute experts: the device, and the CPU of its machine (from the host tier)."""
FIRST_WORKER = 2
"""The lowest unit number of other machines (`smoe.cluster`)."""


class LoadReason(Enum):
    """The reason for loading an expert."""

    DEMAND = "demand"
    PREFETCH = "prefetch"
    UPGRADE = "upgrade"


class Load(NamedTuple):
    """A load of `key` into `slot`."""

    key: ExpertKey
    slot: int
    victim: ExpertKey | None
    """The copy that is evicted when the load starts; None where the slot is already free."""
    keep: bool
    """Whether the copy stays resident after its layer (a cache slot) or leaves at once (a staging slot)."""
    reason: LoadReason
    after: int
    """The number of serves of the plan that must have been computed before the slot may be overwritten."""


class Serve(NamedTuple):
    """A computation of expert `key` for its routes."""

    key: ExpertKey
    routes: tuple[int, ...]
    """Flat positions t * K + k in top_k_index, ascending."""
    waits: bool
    """Whether the copy is not ready yet, so that the computation has to wait."""
    unit: int = DEVICE
    """The unit that computes the expert. For another unit than the device nothing is loaded."""


class Promotion(NamedTuple):
    """A copy in a staging slot that stays: its slot becomes a cache slot, at once or after its serve.

    Slots are interchangeable, so nothing is copied: the slot of `victim` (or a free cache slot, where victim is None)
    becomes the staging slot instead.
    """

    key: ExpertKey
    victim: ExpertKey | None
    after: int = 0
    """The number of serves of the plan that must have been computed before; above 0, the copy's own serve is the last
    of them."""


class LayerPlan(NamedTuple):
    """The serves, loads and promotions of one layer in one step."""

    layer: int
    serves: list[Serve]
    loads: list[Load]
    promotions: list[Promotion]
    hits: int
    """The number of experts that were ready or in flight when the plan was made."""
    spare: dict[int, list[tuple[int, int]]]
    """Staging slots that a prompt's plan leaves to prefetches, by the first slot of their pool: (slot, serves that must
    have been computed before). Missing pools, and decode: all free staging slots."""
