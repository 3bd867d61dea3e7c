"""`smoe replay`: computes the hit ratio of a cache of any size and policy on a recorded run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.options import Debug, Json
from smoe.errors import ConfigError
from smoe.policy.registry import EVICTION, LEARNED, POOLS, SCORED_EVICTION
from smoe.presets import configure
from smoe.routing import Phase, Routing
from smoe.units import parse_bytes, parse_share

if TYPE_CHECKING:
    from smoe.policy.eviction.base import Eviction
    from smoe.policy.eviction.learned import NextUse
    from smoe.trace.record import TraceHeader

EPILOG = """Examples:

smoe replay demo.trace --resident 40%

smoe replay demo.trace --slots 96 --eviction belady     (the bound that no policy beats)

smoe replay demo.trace --resident 0.4 --eviction score --alpha 0.3 --json

smoe replay demo.trace --resident 40% --profile rtx-4060-ti --expert-size 9MiB --balance optimal

Traces are written by smoe record. Nothing is computed and no model is needed.
"""


def command(
    trace: Annotated[Path, typer.Argument(help="A trace written by smoe record.")],
    slots: Annotated[int | None, typer.Option(help="Number of experts that fit in memory.")] = None,
    resident: Annotated[str | None, typer.Option(help="Instead of --slots: a share of all experts, e.g. 40%.")] = None,
    eviction: Annotated[str, typer.Option(help=f"Which resident expert is evicted first: {', '.join(EVICTION)}.")] = (
        "auto"
    ),
    alpha: Annotated[
        float,
        typer.Option(
            help="Replace missing experts of low score; how this changes the model's later choices is not simulated."
        ),
    ] = 0.0,
    pools: Annotated[str, typer.Option(help="One pool of slots for all layers, or one for each: global, layer.")] = (
        "global"
    ),
    profile: Annotated[
        str | None,
        typer.Option(help="Also simulate the time with this device: rtx-a6000, rtx-4060-ti or a JSON file."),
    ] = None,
    expert_size: Annotated[str | None, typer.Option(help="With --profile: size of an expert, e.g. 9MiB.")] = None,
    balance: Annotated[
        str | None,
        typer.Option(help="With --profile: which missing experts the CPU computes: none, optimal, paper, host."),
    ] = None,
    foresight: Annotated[
        float | None,
        typer.Option(help="With --profile: prefetch by a predictor that is right with this probability, 0 to 1."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Replay a recorded run through a cache of a given size: hit ratio and misses of its decode steps.

    The engine's own planner decides, from an empty cache, without prefetch; prompts warm the cache and are not counted.
    With --profile the same plans run on a virtual clock, with the times of that device.
    """
    from smoe.cli.console import Patience, output, print_json

    _check(slots, resident, eviction, alpha, pools)
    _check_clock(profile, expert_size, balance, foresight, pools)
    bar = Patience("replaying")
    bar.start()
    try:
        found = _replay(trace, slots, resident, eviction, alpha, pools)
        if profile is not None and expert_size is not None:
            found |= _on_clock(trace, found, profile, expert_size, balance or "none", foresight)
    finally:
        bar.stop()
    if json:
        print_json(found)
        return
    share = f"{found['slots']} of {found['experts']} experts resident ({found['resident_share']:.0%})"
    output().print(
        f"{found['model']}, {share}, {eviction}, {pools} pools, alpha {alpha:g}", markup=False, soft_wrap=True
    )
    output().print(f"hit ratio  {found['hit_ratio']:.1%}")
    output().print(f"misses     {found['misses']} of {found['uses']} uses in {found['decode_steps']} decode steps")
    if profile is not None:
        output().print(f"time       {1e3 * found['seconds_per_step']:.1f} ms a step with {profile} (simulated)")
        output().print(
            f"of these   {found['loads']} loaded, {found['computed_by_host']} computed by the CPU (balance "
            f"{found['balance']}), {found['prefetches']} prefetched"
        )


def _check(slots: int | None, resident: str | None, eviction: str, alpha: float, pools: str) -> None:
    """Raise `ConfigError` for invalid options, before the trace is opened."""
    if pools not in POOLS:
        raise ConfigError.no_choice("pools", pools, POOLS)
    configure(alpha=alpha)
    if slots is None and resident is None:
        message = "the size of the cache is missing; give either --slots N or --resident 40%"
        raise ConfigError(message, setting="slots", allowed="a whole number, where `resident` is not given")
    if slots is not None and resident is not None:
        message = f"--slots {slots} and --resident {resident} both set the size of the cache; leave out one of the two"
        raise ConfigError(message, setting="slots", given=slots, allowed="only without `resident`")
    if resident is not None:
        parse_share(resident, "resident")
    if eviction not in EVICTION:
        raise ConfigError.no_choice("eviction", eviction, EVICTION)
    if eviction == "belady" and alpha > 0:
        message = (
            "--eviction belady needs the model's own future choices, which --alpha changes; leave out one of the two"
        )
        raise ConfigError(message, setting="alpha", given=alpha, allowed="0 with `eviction` belady")


def _check_clock(
    profile: str | None, expert_size: str | None, balance: str | None, foresight: float | None, pools: str
) -> None:
    """Raise `ConfigError` where a simulated time lacks an option, or where an option would have no effect."""
    from smoe.memory.emulation import read_profile
    from smoe.report.replayed import BALANCE

    idle = {"expert_size": expert_size, "balance": balance, "foresight": foresight}
    for name, value in idle.items():
        if profile is None and value is not None:
            raise ConfigError.idle(name, value, "`profile`")
    if profile is not None and expert_size is None:
        message = "--profile needs the size of an expert, which a trace does not contain: add --expert-size 9MiB"
        raise ConfigError(message, setting="expert_size", allowed="a size, with `profile`")
    if profile is not None and pools != "global":
        message = "--profile simulates one pool for all layers; leave --pools out"
        raise ConfigError(message, setting="pools", given=pools, allowed="global with `profile`")
    if expert_size is not None and not 1 <= parse_bytes(expert_size, "expert_size") <= 2**40:
        raise ConfigError.out_of_bounds("expert_size", expert_size, "from 1B to 1TiB")
    if balance is not None and balance not in BALANCE:
        raise ConfigError.no_choice("balance", balance, BALANCE)
    if foresight is not None and not 0 <= foresight <= 1:
        raise ConfigError.out_of_bounds("foresight", foresight, "a probability from 0 to 1")
    if profile is not None:
        read_profile(profile)


def _on_clock(
    path: Path, found: dict[str, Any], profile: str, expert_size: str, balance: str, foresight: float | None
) -> dict[str, Any]:
    """Replay the run with the times of a device."""
    from smoe.memory.emulation import read_profile
    from smoe.policy.step import Switches
    from smoe.report.replayed import replayed_on
    from smoe.trace.file import Trace

    eviction, alpha = found["eviction"], found["alpha"]
    trace = Trace(path)
    routings = trace.routings(with_scores=alpha > 0 or eviction in SCORED_EVICTION or balance != "none")
    return replayed_on(
        read_profile(profile),
        parse_bytes(expert_size),
        routings,
        found["slots"],
        _policy(eviction, routings, trace.header),
        Switches(alpha),
        balance,
        foresight,
    )


def _replay(
    path: Path, slots: int | None, resident: str | None, eviction: str, alpha: float, pools: str
) -> dict[str, Any]:
    import numpy as np

    from smoe.policy.budget import MIN_STAGING_SLOTS
    from smoe.policy.step import Switches
    from smoe.simulator.replay import replay, replay_by_layer
    from smoe.trace.file import Trace
    from smoe.trace.record import PHASES

    trace = Trace(path)
    header = trace.header
    room = _slots(header, slots, resident, pools)
    routings = trace.routings(with_scores=alpha > 0 or eviction in SCORED_EVICTION)
    switches = Switches(alpha)
    if pools == "layer":
        counts = replay_by_layer(
            routings, room, MIN_STAGING_SLOTS, lambda part: _policy(eviction, part, header), switches
        )
    else:
        counts = replay(routings, room, MIN_STAGING_SLOTS, _policy(eviction, routings, header), switches)
    decoded = trace.rows["step"][trace.rows["phase"] == PHASES.index(Phase.DECODE)]
    return {
        "trace": str(path),
        "model": header.model,
        "eviction": eviction,
        "alpha": alpha,
        "pools": pools,
        "slots": room,
        "experts": header.experts,
        "resident_share": min(1.0, room / header.experts),
        "decode_steps": len(np.unique(decoded)),
        "uses": counts.uses,
        "misses": counts.misses,
        "hit_ratio": counts.hit_ratio,
    }


def _slots(header: TraceHeader, slots: int | None, resident: str | None, pools: str) -> int:
    room = slots if slots is not None else int(header.experts * parse_share(resident or "", "resident"))
    least = max(layer.top_k for layer in header.layers) * (len(header.layers) if pools == "layer" else 1)
    if least <= room <= header.experts:
        return room
    setting, given = ("slots", str(slots)) if slots is not None else ("resident", str(resident))
    share = f", {math.ceil(1000 * least / header.experts) / 10:g}% of the {header.experts}" if slots is None else ""
    allowed = f"at least {least}{share}" if room < least else f"at most {header.experts}"
    if room < least:
        why = f"the model uses {max(layer.top_k for layer in header.layers)} of a layer for every token"
        each = f", and --pools layer requires that for each of {len(header.layers)} layers" if pools == "layer" else ""
        message = f"`{setting}` {given}: a cache of {room} experts is too small: {why}{each}; give {allowed}"
    else:
        message = f"`{setting}` is {given}; the model has {header.experts} experts: give {allowed}"
    raise ConfigError(message, setting=setting, given=given if slots is None else slots, allowed=allowed)


def _policy(name: str, future: Sequence[Routing], header: TraceHeader) -> Eviction:
    """Return a policy by name; Belady gets the future, the learned policy its parameters for the model."""
    from smoe.routing import observation

    if name == LEARNED:
        return EVICTION[name](next_use_for(header))
    return EVICTION[name](*([map(observation, future)] if name == "belady" else []))


def next_use_for(header: TraceHeader) -> NextUse:
    """Return the learned parameters of the eviction policy for a trace's model. Raises `ConfigError` where there are
    none."""
    from smoe.load.next_use import next_use_of
    from smoe.models.files import local_place

    place = local_place(header.model)
    if place is None:
        message = f"`eviction` learned needs the recorded model, {header.model}, which is not on this machine"
        raise ConfigError(message, setting="eviction", given=LEARNED, allowed="for traces of models on this machine")
    return next_use_of(place, {layer.layer: layer.experts for layer in header.layers})[0]
