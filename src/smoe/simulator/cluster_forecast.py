"""How long a token will take on a cluster of our own, from pieces that were measured of it, or are known of machines
that has not been bought yet.

Of each worker what main keeps (`Member`: seconds for a load, an expert, there and back), of main its part of a layer;
who computes what, and who holds what, is then simulated on a recorded run of the model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from smoe.expert import ExpertKey
from smoe.policy.placement import group
from smoe.policy.plan import DEVICE, FIRST_WORKER
from smoe.routing import Phase, Routing
from smoe.simulator.cluster import DecodedToken, Wire, WorkerTimes
from smoe.simulator.cluster_ours import OurCluster, OurRun, decode
from smoe.simulator.cluster_shadow import ShadowTimes

SPREAD = 0.05
"""The spread of measured loads (docs/log/cluster.md)."""


@dataclass(frozen=True)
class MeasuredWorker:
    """Seconds, but for the slots."""

    load: float
    expert: float
    hop: float
    """There and back, for few rows."""
    slots: int


@dataclass(frozen=True)
class MeasuredMain:
    """Seconds, but for the slots."""

    layer: float
    """All but the experts."""
    message: float = 0.0
    """Seconds to send or receive a message, for which others wait."""
    load: float = 0.0
    expert: float = 0.0
    slots: int = 0
    """The slots of experts that it keeps and computes itself; 0: it computes none, as with `round-robin`."""
    ahead: int = 1
    """Further experts that it can load before they are requested."""


@dataclass(frozen=True)
class Port:
    """What main's port adds to messages, where it is narrow."""

    bytes_per_second: float = inf
    row_bytes: float = 0.0
    """Bytes of a hidden state."""


def foretell(
    tokens: Sequence[DecodedToken],
    main: MeasuredMain,
    workers: Sequence[MeasuredWorker],
    placement: str,
    shadow: ShadowTimes | None = None,
    port: Port = Port(),
    before: Sequence[ExpertKey] = (),
    spread: float = SPREAD,
    everything: Sequence[ExpertKey] = (),
) -> OurRun:
    """These tokens on this cluster, whose shadow, if any, runs on main.

    `placement`: one of `PLACEMENT`. Workers get what tokens name (`DecodedToken.named`): by the shadow, when it
    has come to it, or where there is none by main, as soon as the router of the layer before has spoken. `before`: what
    was used before them, the last at the end: it is dealt out to the machines' slots, which are empty where there is
    none. `spread`: by how much one measured load differs from the next, as a share. `everything`: all experts, which a
    main with room for them has read beforehand, as `preload` does; empty: it has not.
    """
    here = WorkerTimes(main.load, main.expert, main.slots) if main.slots and placement == "finish" else None
    held = _dealt_out(before, main.slots if here is not None else 0, workers, placement, len(tokens[0].chosen[0]))
    if here is not None and everything and main.slots >= len(everything):
        held[DEVICE] = list(everything)
    cluster = OurCluster(
        main.layer,
        Wire(port.bytes_per_second, 0.0, main.message),
        port.row_bytes,
        [WorkerTimes(each.load, each.expert, each.slots, each.hop / 2) for each in workers],
        placement,
        here,
        main.ahead,
        shadow,
        held,
        spread,
    )
    return decode(cluster, tokens)


def _dealt_out(
    before: Sequence[ExpertKey], own_slots: int, workers: Sequence[MeasuredWorker], placement: str, chosen: int
) -> dict[int, list[ExpertKey]]:
    """Those used last first, each to the machine with the most room left of those that may be asked for it. By turns
    any of a group may be, sooner or later, so there all get it who have room; else one alone, who is then preferred."""
    units = range(FIRST_WORKER, FIRST_WORKER + len(workers))
    room = {unit: worker.slots for unit, worker in zip(units, workers, strict=True)} | {DEVICE: own_slots}
    held: dict[int, dict[ExpertKey, None]] = {unit: {} for unit in room}
    recent = list(dict.fromkeys(reversed(before)))
    for _ in range(1 if placement == "finish" else len(workers)):
        for key in recent:
            able = [DEVICE, *units] if placement == "finish" else group(key[0], chosen, units)
            unit = max(able, key=lambda each: (key not in held[each], room[each]))
            if room[unit] and key not in held[unit]:
                room[unit] -= 1
                held[unit][key] = None
    order = {key: place for place, key in enumerate(recent)}
    return {unit: sorted(keys, key=order.__getitem__, reverse=True) for unit, keys in held.items() if keys}


def named_at(tokens: Sequence[DecodedToken], experts: int, recall: float, seed: int = 0) -> list[DecodedToken]:
    """The same tokens with predictions that name each expert with this probability, else another one. The next
    token is predicted as well as its experts. The same draws for the same seed."""
    chance = random.Random(seed)

    def named(chosen: Sequence[int], share: float) -> list[int]:
        others = [expert for expert in range(experts) if expert not in chosen]
        strays = iter(chance.sample(others, min(len(chosen), len(others))))
        return [expert if chance.random() < share else next(strays, expert) for expert in chosen]

    return [
        DecodedToken(
            token.chosen,
            [named(chosen, recall) for chosen in token.chosen],
            chance.random() < recall,
            [named(chosen, 0.0) for chosen in token.chosen],
        )
        for token in tokens
    ]


def decoded_tokens(trace: Sequence[Routing], named: Sequence[Sequence[int]] | None = None) -> list[DecodedToken]:
    """The decode steps of one sequence of a trace; each must have all layers, in their order. `named`: for each routing
    of these steps the experts that main's predictor named beforehand; None: none."""
    steps: list[list[Sequence[int]]] = []
    guesses: list[list[Sequence[int]]] = []
    before = inf
    for number, routing in enumerate(each for each in trace if each.phase is Phase.DECODE):
        assert len(routing.top_k_index) == 1, "one sequence"
        if routing.layer <= before:
            steps.append([])
            guesses.append([])
        before = routing.layer
        steps[-1].append([expert for expert in routing.top_k_index[0] if expert != routing.experts])
        guesses[-1].append(() if named is None else named[number])
    return [DecodedToken(chosen, guess) for chosen, guess in zip(steps, guesses, strict=True)]
