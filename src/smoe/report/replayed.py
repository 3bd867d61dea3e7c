"""Simulates a recorded run on a device that is described by a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smoe.memory.emulation import DeviceProfile
from smoe.policy.budget import MAX_STAGING_SLOTS
from smoe.policy.eviction.base import Eviction
from smoe.policy.load_or_compute import BALANCERS
from smoe.policy.prediction import Predictor
from smoe.policy.step import Switches
from smoe.routing import Routing
from smoe.simulator.foresight import Foresight
from smoe.simulator.virtual_clock import StepTimes, replay_on_clock

BALANCE = ("none", *BALANCERS)


def times_on(profile: DeviceProfile, expert_bytes: int, deciding: float = 0.0) -> StepTimes:
    """Return the times of a profile's device for experts of the given size. Non-expert weights count as 0 bytes here,
    but their kernel launches take time."""
    return StepTimes(
        load=profile.link_seconds(expert_bytes),
        expert=lambda rows: profile.expert_seconds(expert_bytes, rows),
        layer=lambda tokens: profile.layer_seconds(0.0, tokens),
        host=lambda rows: profile.host_seconds(expert_bytes, rows),
        deciding=deciding,
        asking=profile.device_expert_seconds,
    )


def replayed_on(
    profile: DeviceProfile,
    expert_bytes: int,
    routings: Sequence[Routing],
    slots: int,
    eviction: Eviction,
    switches: Switches,
    balance: str = "none",
    foresight: float | None = None,
    predictor: Predictor | None = None,
) -> dict[str, Any]:
    """Return the replay of a recorded run on a profile's device, ready for JSON: the seconds per decode step, and the
    numbers of loads and prefetches. `balance`: one of `BALANCE`; `foresight`: the recall, from 0 to 1, of a simulated
    predictor in place of `predictor`."""
    if foresight is not None:
        predictor = Foresight(routings, foresight)
    timed = replay_on_clock(
        routings,
        slots,
        MAX_STAGING_SLOTS,
        eviction,
        times_on(profile, expert_bytes),
        switches,
        None if balance == "none" else balance,
        predictor,
    )
    return {
        "profile": profile.name,
        "expert_bytes": expert_bytes,
        "balance": balance,
        "foresight": foresight,
        "seconds_per_step": timed.seconds_per_step,
        "loads": timed.loads,
        "prefetches": timed.prefetches,
        "prefetches_used": timed.prefetches_used,
        "computed_by_host": timed.computed_by_host,
    }
