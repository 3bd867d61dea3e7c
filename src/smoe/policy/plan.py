"""The types of plans, which policies make and the engine and the simulator execute.

A plan for one layer of one step has a list of *serves* (computations of one expert each), executed in order, and a list
of *loads*, started in order. A load whose slot is still used by a serve has to wait: `Load.after` is the number of
serves that must be complete before it starts. Loads with `after == 0` start at once.

    serves   s0   s1   s2   s3   s4 ...
    loads    l0 (after 0)   l1 (after 0)   l2 (after 2: uses the slot of s1) ...
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from smoe.expert import ExpertKey

DEVICE, HOST = 0, 1
"""The numbers of the compute units of one machine: the device, and the CPU of a machine with a device, which uses
experts in host memory."""
FIRST_WORKER = 2
"""The lowest unit number of a worker on another machine (`smoe.cluster`)."""


class LoadReason(Enum):
    """Why an expert is loaded: a layer needs it, it is predicted, or a low-precision copy is replaced by the full
    one."""

    DEMAND = "demand"
    PREFETCH = "prefetch"
    UPGRADE = "upgrade"


class Load(NamedTuple):
    """The load of the copy `key` into slot number `slot`, as part of a plan."""

    key: ExpertKey
    slot: int
    victim: ExpertKey | None
    """The copy that is evicted when the load starts; None if the slot is free."""
    keep: bool
    """Whether the copy stays resident after its layer (in a cache slot). Otherwise it is dropped at once (staging
    slot)."""
    reason: LoadReason
    after: int
    """The number of serves of the plan that must be complete before the slot may be overwritten."""


class Serve(NamedTuple):
    """The computation of the copy `key` for all routes that chose it, as part of a plan."""

    key: ExpertKey
    routes: tuple[int, ...]
    """The flat indices t * K + k in `top_k_index`, in the order in which their rows are stacked
    (`planner.routes_by_key`)."""
    waits: bool
    """Whether the copy is not in memory yet, so that the computation has to wait for its load."""
    unit: int = DEVICE
    """The unit that computes the expert. A unit other than the device needs no load."""


class Promotion(NamedTuple):
    """The change by which a copy in a staging slot becomes resident: its slot becomes a cache slot, at once or after
    its serve (its computation).

    Slots are interchangeable, so no data is copied. In exchange, the slot of `victim` becomes a staging slot; if
    `victim` is None, a free cache slot does.
    """

    key: ExpertKey
    victim: ExpertKey | None
    after: int = 0
    """The number of serves of the plan that must be complete before the promotion. If it is above 0, the last of these
    serves is the copy's own."""


class LayerPlan(NamedTuple):
    """The serves, loads and promotions of one layer in one step."""

    layer: int
    serves: list[Serve]
    loads: list[Load]
    promotions: list[Promotion]
    hits: int
    """The number of used experts that were resident or in flight when the plan was made."""
    spare: dict[int, list[tuple[int, int]]]
    """The staging slots that prefetches may use during this plan, by the first slot number of their pool: pairs (slot,
    the number of serves that must be complete before the slot is used). For a pool that is not listed, all free staging
    slots may be used; in decode no pool is listed."""
