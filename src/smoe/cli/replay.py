"""`smoe replay`: computes the hits and misses that a cache of any size and policy would have had in a recorded run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.options import Debug, Json
from smoe.errors import ConfigError
from smoe.plug_ins import PLACE
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.registry import EVICTION, EVICTIONS, FITTED, LEARNED, POOLS, PREDICTORS
from smoe.presets import configure
from smoe.routing import Phase, Routing
from smoe.units import parse_bytes, parse_share

if TYPE_CHECKING:
    from smoe.policy.eviction.base import Eviction
    from smoe.policy.eviction.learned import NextUse
    from smoe.policy.prediction import Predictor
    from smoe.trace.record import TraceHeader

EPILOG = """Examples:

smoe replay demo.trace --resident 40%

smoe replay demo.trace --slots 96 --eviction belady     (the bound that no policy beats)

smoe replay demo.trace --resident 0.4 --eviction score --alpha 0.3 --json

smoe replay demo.trace --resident 40% --profile rtx-4060-ti --expert-size 9MiB --balance optimal

Traces are written by smoe record. Nothing is computed and no model is needed.
"""


@dataclass(frozen=True)
class ClockOptions:
    """The options for a replay that also simulates time."""

    profile: Annotated[
        str | None,
        typer.Option(help="Also simulate the time per step on this machine: rtx-a6000, rtx-4060-ti or a JSON file."),
    ] = None
    expert_size: Annotated[
        str | None,
        typer.Option(help="With --profile: size of an expert, e.g. 9MiB, from which the time of a load follows."),
    ] = None
    balance: Annotated[
        str | None,
        typer.Option(
            help="With --profile: which missing experts the CPU computes. none (the default): no experts; optimal: "
            "as many as make each layer fastest; paper: as SMoE's published algorithm chooses; host: all."
        ),
    ] = None
    foresight: Annotated[
        float | None,
        typer.Option(
            help="With --profile: simulate a prefetch each of whose predictions is right with this probability, 0 to 1."
        ),
    ] = None
    prefetch: Annotated[
        str | None,
        typer.Option(
            help="With --profile: simulate a prefetch with this predictor, which uses only earlier routing "
            f"(docs/settings.md describes each): previous-token, {', '.join(FITTED)}, or a plug-in's {PLACE}."
        ),
    ] = None


def command(
    trace: Annotated[Path, typer.Argument(help="A trace written by smoe record.")],
    slots: Annotated[
        int | None, typer.Option(help="Size of the cache: the number of experts that fit in memory.")
    ] = None,
    resident: Annotated[
        str | None, typer.Option(help="Instead of --slots: the size of the cache as a share of all experts, e.g. 40%.")
    ] = None,
    eviction: Annotated[
        str,
        typer.Option(
            help=f"Rule that chooses the resident expert to evict (docs/evictions.md): {', '.join(EVICTION)}, or a "
            f"plug-in's {PLACE}."
        ),
    ] = "auto",
    alpha: Annotated[
        float,
        typer.Option(
            help="Replace missing experts of low score by resident experts, as smoe generate does. "
            "The effect on the model's later choices of experts is not simulated."
        ),
    ] = 0.0,
    pools: Annotated[
        str, typer.Option(help="global: all layers share the cache; layer: each layer has a fixed part of the cache.")
    ] = ("global"),
    *,
    clock: ClockOptions,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Replay a recorded run through a cache of a given size: hit ratio and misses of its decode steps.

    The engine's own planner decides, from an empty cache, without prefetch; prompts warm the cache and are not counted.
    With --profile the same plans run on a virtual clock, with the times of that device.
    """
    from smoe.cli.console import Patience, print_json

    _check(slots, resident, eviction, alpha, pools)
    _check_clock(clock, pools)
    bar = Patience("replaying")
    bar.start()
    try:
        found = _replay(trace, slots, resident, eviction, alpha, pools)
        if clock.profile is not None:
            found |= _on_clock(trace, found, clock)
    finally:
        bar.stop()
    if json:
        print_json(found)
    else:
        _print(found, clock.profile)


def _print(found: dict[str, Any], profile: str | None) -> None:
    from smoe.cli.console import output

    share = f"{found['slots']} of {found['experts']} experts resident ({found['resident_share']:.0%})"
    output().print(
        f"{found['model']}, {share}, {found['eviction']}, {found['pools']} pools, alpha {found['alpha']:g}",
        markup=False,
        soft_wrap=True,
    )
    output().print(f"hit ratio  {found['hit_ratio']:.1%}")
    output().print(f"misses     {found['misses']} of {found['uses']} uses in {found['decode_steps']} decode steps")
    if profile is not None:
        output().print(f"time       {1e3 * found['seconds_per_step']:.1f} ms a step with {profile} (simulated)")
        output().print(
            f"of these   {found['loads']} loaded, {found['computed_by_host']} computed by the CPU (balance "
            f"{found['balance']}), {found['prefetches']} prefetched, of which {found['prefetches_used']} were used"
        )


def _check(slots: int | None, resident: str | None, eviction: str, alpha: float, pools: str) -> None:
    """Raise `ConfigError` for invalid options of `smoe replay`, before the trace is opened."""
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
    if "future" in EVICTIONS.find(eviction).settings and alpha > 0:
        message = (
            f"--eviction {eviction} needs the model's own future choices, which --alpha changes; leave out one of "
            "the two"
        )
        raise ConfigError(message, setting="alpha", given=alpha, allowed=f"0 with `eviction={eviction}`")


def _check_clock(clock: ClockOptions, pools: str) -> None:
    """Raise `ConfigError` if an option that a simulated time requires is missing, or if an option would have no
    effect."""
    from smoe.memory.emulation import read_profile
    from smoe.report.replayed import BALANCE

    given = {option.name: getattr(clock, option.name) for option in fields(clock)}
    profile, expert_size, balance, foresight, prefetch = given.values()
    for name, value in given.items():
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
    if prefetch is not None and "prefetch_asked" not in PREDICTORS.find(prefetch).settings:
        of_history = [name for name in PREDICTORS.built_in if "prefetch_asked" in PREDICTORS.find(name).settings]
        raise ConfigError.no_choice("prefetch", prefetch, (*of_history, PLACE))
    if prefetch is not None and foresight is not None:
        message = f"--prefetch {prefetch} and --foresight {foresight:g} both predict; leave out one of the two"
        raise ConfigError(message, setting="foresight", given=foresight, allowed="only without `prefetch`")
    if profile is not None:
        read_profile(profile)


def _on_clock(path: Path, found: dict[str, Any], clock: ClockOptions) -> dict[str, Any]:
    """Replay the recorded run with the times of a device. Return the results, ready for JSON."""
    from smoe.memory.emulation import read_profile
    from smoe.policy.step import Switches
    from smoe.report.replayed import replayed_on
    from smoe.trace.file import Trace

    assert clock.profile is not None and clock.expert_size is not None, "checked"
    eviction, alpha, balance = found["eviction"], found["alpha"], clock.balance or "none"
    trace = Trace(path)
    routings = trace.routings(with_scores=alpha > 0 or EVICTIONS.find(eviction).needs_scores or balance != "none")
    return {"prefetch": clock.prefetch} | replayed_on(
        read_profile(clock.profile),
        parse_bytes(clock.expert_size),
        routings,
        found["slots"],
        _policy(eviction, routings, trace.header),
        Switches(alpha),
        balance,
        clock.foresight,
        _predictor(clock.prefetch, trace.header) if clock.prefetch is not None else None,
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
    routings = trace.routings(with_scores=alpha > 0 or EVICTIONS.find(eviction).needs_scores)
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
        message = f"`{setting}={given}`: a cache of {room} experts is too small: {why}{each}; give {allowed}"
    else:
        message = f"`{setting}` is {given}; the model has {header.experts} experts: give {allowed}"
    raise ConfigError(message, setting=setting, given=given if slots is None else slots, allowed=allowed)


def _policy(name: str, future: Sequence[Routing], header: TraceHeader) -> Eviction:
    """Return an eviction policy by its name. The policies that need it get the future of the trace, or the parameters
    that were learned for the model."""
    from smoe.policy.step import observation

    kind = EVICTIONS.find(name)
    next_use = next_use_for(header) if kind.learned else None
    return kind.of_settings(EvictionSettings(name, next_use=next_use, future=map(observation, future)))


def _predictor(name: str, header: TraceHeader) -> Predictor | None:
    """Return a predictor by its name. A predictor that needs them gets the parameters that were fitted for the trace's
    model."""
    from smoe.prediction.history import HistoryInputs
    from smoe.trace.paths import routed_layers

    kind = PREDICTORS.find(name)
    learned = _learned(name, kind.learned, header) if kind.is_fitted else None
    return kind.make(HistoryInputs(routed_layers(header), learned))


def next_use_for(header: TraceHeader) -> NextUse:
    """Return the parameters of `--eviction learned` that were trained for the trace's model.

    Raises `ConfigError` if there are none.
    """
    found: NextUse = _learned(LEARNED, EVICTIONS.find(LEARNED).learned, header).next_use
    return found


def _learned(name: str, place: str, header: TraceHeader) -> Any:
    """Return the value of the class at `place` that was learned for a policy or predictor and the trace's model."""
    from smoe.load.learned_file import LearnedValue, ModelShape
    from smoe.plug_ins import attribute_at

    kind: type[LearnedValue] = attribute_at(place)
    experts = {layer.layer: layer.experts for layer in header.layers}
    return kind.read(name, _place_of(header, kind.setting, name), ModelShape(experts))


def _place_of(header: TraceHeader, setting: str, value: str) -> Path:
    """Return the folder of the model that was recorded in the trace. `value`: the policy or predictor that needs this
    folder, for the error message."""
    from smoe.models.files import local_place

    place = local_place(header.model)
    if place is None:
        message = f"`{setting}={value}` needs the recorded model, {header.model}, which is not on this machine"
        raise ConfigError(message, setting=setting, given=value, allowed="for traces of models on this machine")
    return place
