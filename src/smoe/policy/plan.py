"""The plan types that policies produce and that engine and simulator carry out.

A step of one layer has a list of *serves*, carried out in order, and a list of *loads*, issued in order.
`Load.after` ties them: the load may start once that many serves of this plan have been computed, because
it takes over a slot that one of them used. Loads with `after == 0` start at once.

    serves   s0   s1   s2   s3   s4 ...
    loads    l0(after 0)  l1(after 0)  l2(after 2: takes the slot of s1) ...
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from smoe.expert import ExpertKey

DEVICE, HOST = 0, 1
"""Units that compute experts: the device, and the CPU of its machine, from the host tier."""
FIRST_WORKER = 2
"""The units from here on are other machines (`smoe.cluster`)."""


class LoadReason(Enum):
    """Why an expert is brought in."""

    DEMAND = "demand"
    PREFETCH = "prefetch"
    UPGRADE = "upgrade"


class Load(NamedTuple):
    """Bring `key` into `slot`."""

    key: ExpertKey
    slot: int
    victim: ExpertKey | None
    """The copy that is forgotten when the load starts; None where the slot was free or was given up before."""
    keep: bool
    """Whether it stays resident after its layer (a cache slot) or leaves at once (a staging slot)."""
    reason: LoadReason
    after: int
    """Serves of the same plan that must have been computed before the slot may be overwritten."""


class Serve(NamedTuple):
    """Compute `key` for its routes."""

    key: ExpertKey
    routes: tuple[int, ...]
    """Flat positions t * K + k into top_k_index, ascending."""
    waits: bool
    """True where the copy is not ready yet and computing it has to wait."""
    unit: int = DEVICE
    """What computes it. For another one than the device nothing is brought in."""


class Promotion(NamedTuple):
    """A copy in a staging slot stays: its slot becomes a cache slot, at once or when it has served.

    Slots are interchangeable, so nothing is copied: the slot of `victim` (or a free cache slot, where
    victim is None) becomes the staging slot instead.
    """

    key: ExpertKey
    victim: ExpertKey | None
    after: int = 0
    """Serves of the plan that must have been computed before; above 0 the copy is the last of them."""


class LayerPlan(NamedTuple):
    """What serves one layer in one step."""

    layer: int
    serves: list[Serve]
    loads: list[Load]
    promotions: list[Promotion]
    hits: int
    """Experts that were ready, or already under way, when the plan was made."""
    spare: dict[int, list[tuple[int, int]]]
    """Staging slots that a prompt's plan leaves to a prefetch, by the first slot of their pool: (slot, serves that must
    have been computed before). Of other pools, and in decode, all that are free."""
