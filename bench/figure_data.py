"""The numbers behind `bench.figures`: what an ablation and a trace say together about missing experts. What a trace
says about ranks is in `smoe.trace.ranks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from smoe.errors import ConfigError
from smoe.memory.emulation import read_profile
from smoe.policy.budget import MAX_STAGING_SLOTS, MIN_STAGING_SLOTS
from smoe.policy.plan_progress import carry_out
from smoe.policy.registry import make_eviction
from smoe.policy.residency import ExpertsAtHand, PoolSize, SlotTable
from smoe.policy.step import EXACT_SWITCHES, Switches, decide, layer_share
from smoe.policy.substitution import substitute
from smoe.report.replayed import times_on
from smoe.routing import Phase, Routing
from smoe.simulator.virtual_clock import replay_on_clock
from smoe.trace.file import Trace

Cell = Mapping[str, Any]
"""One ablation, as its JSON has it."""


class Missing(NamedTuple):
    """Routes whose expert was not at hand, as shares of all routes."""

    top: float
    low: float


def missing_by_kind(routings: Sequence[Routing], slots: int, eviction: str, alpha: float, begin: int) -> Missing:
    """Decode steps served exactly from an empty cache; what is missing told apart by the interval of `alpha`.

    `begin`: the first routing that is counted; those before it warm the cache.
    """
    table, policy = SlotTable(PoolSize(slots, MIN_STAGING_SLOTS)), make_eviction(eviction)
    share = layer_share(slots, len({routing.layer for routing in routings}))
    top = low = routes = 0
    for number, routing in enumerate(routings):
        if number >= begin and routing.phase is Phase.DECODE:
            here = ExpertsAtHand(routing.layer, table)
            found = substitute(routing, here, alpha, share=False, drop=False)
            top, low = top + found.top_score_missing, low + found.low_score_missing
            routes += sum(expert < routing.experts for row in routing.top_k_index for expert in row)
        carry_out(decide(routing, table, policy, share, EXACT_SWITCHES).plan, table, policy)
    return Missing(top / routes, low / routes) if routes else Missing(0.0, 0.0)


def low_share(trace: Trace, cell: Cell, eviction: str, alpha: float) -> float:
    """Of the missing experts of an exact step, the low-score ones: from the trace, its second half counted."""
    routings = trace.routings(with_scores=True)
    found = missing_by_kind(routings, slots_of(trace, cell), eviction, alpha, len(routings) // 2)
    return found.low / (found.top + found.low) if found.top + found.low else 0.0


def slots_of(trace: Trace, cell: Cell) -> int:
    """Cache slots of the ablation."""
    return round(float(cell["resident_share"]) * trace.header.experts)


def step_of(cell: Cell, name: str) -> Mapping[str, Any]:
    """One step; raises `ConfigError` where the ablation lacks it."""
    for step in cell["steps"]:
        if step["name"] == name:
            found: Mapping[str, Any] = step
            return found
    raise ConfigError(f"the ablation has no step {name!r}")


def steps_of(cell: Cell, names: Sequence[str], least: int = 2) -> list[Mapping[str, Any]]:
    """Those of the named steps that are there; raises `ConfigError` where there are fewer than `least`."""
    there = {step["name"]: step for step in cell["steps"]}
    found = [there[name] for name in names if name in there]
    if len(found) < least:
        raise ConfigError(f"the ablation has too few of the steps {', '.join(names)}")
    return found


def missing_of(trace: Trace, cell: Cell, name: str, alpha: float) -> tuple[float, float, float]:
    """(top-score, low-score that stay missing, substituted) of one step, as shares of the routes.

    An exact step does not tell them apart: how many are missing is the ablation's, of which kind is the trace's.
    """
    step = step_of(cell, name)
    if step["substituted_share"] is not None:
        low, replaced = step["low_score_missing_share"], step["substituted_share"]
        return step["top_score_missing_share"], low - replaced, replaced
    if cell["batch"] != 1:
        raise ConfigError(f"in a batch, the missing experts of the exact step {name!r} are not known by route")
    missing, low = 1.0 - step["hit_ratio"], low_share(trace, cell, step["switches"]["eviction"], alpha)
    return missing * (1.0 - low), missing * low, 0.0


def time_shares(trace: Trace, cell: Cell, alpha: float) -> tuple[float, float, float, float]:
    """(low-score loading, top-score loading, computing, deciding) of a token's time under LRU on demand.

    Loading is the time waited for loads, shared out by the number of missing experts.
    """
    step = step_of(cell, "LRU on demand")
    waited, deciding = step["wait_seconds_per_token"], step["python_seconds_per_token"]
    computing = step["expert_seconds_per_token"] + step["other_layers_seconds_per_token"]
    low, whole = low_share(trace, cell, "lru", alpha), waited + computing + deciding
    return waited * low / whole, waited * (1.0 - low) / whole, computing / whole, deciding / whole


def prefetches_per_token(trace: Trace, cell: Cell, step: Mapping[str, Any]) -> float | None:
    """What was loaded and not missing when its layer came; None in a batch, whose uses are not known."""
    if cell["batch"] != 1:
        return None
    uses = sum(layer.top_k for layer in trace.header.layers)
    on_demand = uses * (1.0 - step["hit_ratio"] - step["host_computed_share"])
    return float(max(0.0, step["loads_per_token"] - on_demand))


def steps_by_alpha(cell: Cell) -> list[Mapping[str, Any]]:
    """The steps that differ from the preset smoe in nothing but alpha, ascending.

    Raises `ConfigError` where there are fewer than three.
    """
    wanted = _others(step_of(cell, "the preset smoe"))
    found = sorted((step for step in cell["steps"] if _others(step) == wanted), key=lambda step: float(step["alpha"]))
    if len({step["alpha"] for step in found}) < 3:
        raise ConfigError("the ablation has the preset smoe at fewer than three alphas")
    return found


def _others(step: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step["switches"].items() if name not in ("alpha", "alpha_as_priced")}


def simulated_seconds(trace: Trace, cell: Cell, alphas: Sequence[float]) -> list[float]:
    """Per decode step at each alpha: the trace on a virtual clock beside the ablation's device, score eviction, best
    split, no prefetch; deciding takes what it took in the ablation. Raises `ConfigError` where nothing was emulated."""
    if cell["profile"] is None or cell["emulated_expert_bytes"] is None:
        raise ConfigError("the ablation is of no emulated device with a size of experts")
    deciding = step_of(cell, "the preset smoe")["python_seconds_per_token"] / len(trace.header.layers)
    times = times_on(read_profile(cell["profile"]), cell["emulated_expert_bytes"], deciding)
    routings, slots = list(trace.routings(with_scores=True)), slots_of(trace, cell)
    found = []
    for alpha in alphas:
        policy = make_eviction("score")
        timed = replay_on_clock(routings, slots, MAX_STAGING_SLOTS, policy, times, Switches(alpha), "optimal")
        counted = timed.step_seconds[len(timed.step_seconds) // 2 :]
        found.append(sum(counted) / len(counted))
    return found
