"""Forecasts the time of a token on a cluster, from measured times, or from those of machines that have not been bought
yet.

The inputs are each worker's times as the coordinator measures them (`Member`: seconds for a load, an expert, a round
trip), and the coordinator's part of a layer. The placement of experts is then simulated on a recorded run of the model.
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
from smoe.simulator.cluster_draft import DraftTimes
from smoe.simulator.cluster_ours import OurCluster, OurRun, decode

SPREAD = 0.05
"""The relative spread of measured loads (docs/log/cluster.md)."""


@dataclass(frozen=True)
class MeasuredWorker:
    """A worker's measured times in seconds, and its slots."""

    load: float
    expert: float
    hop: float
    """Seconds for a message there and back, for few rows."""
    slots: int


@dataclass(frozen=True)
class MeasuredCoordinator:
    """The coordinator's measured times in seconds, and its slots."""

    layer: float
    """Seconds of a layer without its experts."""
    message: float = 0.0
    """Seconds to send or receive a message, one after the other."""
    load: float = 0.0
    expert: float = 0.0
    slots: int = 0
    """The slots of experts that it holds and computes itself; 0: it computes none, as with `round-robin`."""
    ahead: int = 1
    """The number of experts that it can load before they are requested."""


@dataclass(frozen=True)
class Port:
    """The coordinator's network port, where it limits messages."""

    bytes_per_second: float = inf
    row_bytes: float = 0.0
    """Bytes of a hidden state."""


def foretell(
    tokens: Sequence[DecodedToken],
    coordinator: MeasuredCoordinator,
    workers: Sequence[MeasuredWorker],
    placement: str,
    draft: DraftTimes | None = None,
    port: Port = Port(),
    before: Sequence[ExpertKey] = (),
    spread: float = SPREAD,
    everything: Sequence[ExpertKey] = (),
) -> OurRun:
    """Simulate these tokens on this cluster, whose draft model, if any, runs on the coordinator.

    `placement`: one of `PLACEMENT`. Workers receive predictions (`DecodedToken.named`) from the draft model when it has
    reached them, or without one from the coordinator after the router of the layer before. `before`: earlier uses, the
    last at the end, which fill the machines' slots. `spread`: the relative variation of measured loads. `everything`:
    all experts, which a coordinator with room for them has loaded beforehand, as `preload` does; empty: it has not.
    """
    here = (
        WorkerTimes(coordinator.load, coordinator.expert, coordinator.slots)
        if coordinator.slots and placement == "finish"
        else None
    )
    held = _dealt_out(
        before, coordinator.slots if here is not None else 0, workers, placement, len(tokens[0].chosen[0])
    )
    if here is not None and everything and coordinator.slots >= len(everything):
        held[DEVICE] = list(everything)
    cluster = OurCluster(
        coordinator.layer,
        Wire(port.bytes_per_second, 0.0, coordinator.message),
        port.row_bytes,
        [WorkerTimes(each.load, each.expert, each.slots, each.hop / 2) for each in workers],
        placement,
        here,
        coordinator.ahead,
        draft,
        held,
        spread,
    )
    return decode(cluster, tokens)


def _dealt_out(
    before: Sequence[ExpertKey], own_slots: int, workers: Sequence[MeasuredWorker], placement: str, chosen: int
) -> dict[int, list[ExpertKey]]:
    """Return each machine's initial experts: the last used ones first, each on the machine with the most free slots.
    With round-robin placement every machine of a group may be asked, so all with room get the expert; otherwise one
    machine gets it, and is then preferred."""
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
    """Return the tokens with predicted experts: each is right with probability `recall`, otherwise another expert. With
    the same probability the draft model's own token is right. Equal seeds give equal draws."""
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
    """Return the decode steps of a trace's only sequence; each must have all layers, in order. `named`: for each
    routing the experts that the coordinator's predictor named beforehand; None: none."""
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
