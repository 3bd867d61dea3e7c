"""Forecasts the time of a token on a cluster, from measured times or from the times of machines that are planned.

The inputs are the times of each worker, as the coordinator measures them (`Member`: seconds for a load, an expert, a
round trip), and the coordinator's own time for a layer. The placement of experts is then simulated on a recorded run of
the model.
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
from smoe.simulator.cluster import DecodedToken, SimulatedCluster, SimulatedRun, Wire, decode
from smoe.simulator.cluster_draft import DraftTimes
from smoe.simulator.cluster_machine import WorkerTimes

SPREAD = 0.05
"""The relative standard deviation of the durations of loads (docs/log/cluster.md)."""


@dataclass(frozen=True)
class MeasuredWorker:
    """The measured times of a worker in seconds, and its number of slots."""

    load: float
    expert: float
    hop: float
    """Seconds for a request with few rows and its reply to travel."""
    slots: int


@dataclass(frozen=True)
class MeasuredCoordinator:
    """The measured times of the coordinator in seconds, and its number of slots."""

    layer: float
    """Seconds that the coordinator takes for a layer without its routed experts."""
    message: float = 0.0
    """Seconds that the coordinator spends on sending or receiving each message, one after the other."""
    load: float = 0.0
    expert: float = 0.0
    slots: int = 0
    """The number of experts that the coordinator can have in memory. 0: it computes no experts, as with
    `round-robin`."""
    ahead: int = 1
    """The number of experts that the coordinator can load before they are requested."""


@dataclass(frozen=True)
class Port:
    """The coordinator's network port, if it limits the messages."""

    bytes_per_second: float = inf
    row_bytes: float = 0.0
    """Bytes of one token's hidden state."""


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
) -> SimulatedRun:
    """Simulate the decoding of these tokens on a cluster. A draft model, if there is one, runs on the coordinator.

    `placement`: one of `PLACEMENT`. With a draft model, workers receive the predictions in `DecodedToken.named` as soon
    as the draft model has made them. Without a draft model, the coordinator sends the predictions after the router of
    the layer before. `before`: earlier uses of experts in their order, which fill the machines' slots. `spread`: the
    relative standard deviation of load times. `everything`: all experts of the model, if a coordinator with enough
    slots has loaded them beforehand (setting `preload`); otherwise empty.
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
    cluster = SimulatedCluster(
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
    """Return {machine: the experts in its slots when the simulation begins}. `before`: earlier uses of experts in their
    order. The experts used last are assigned first, each to the machine with the most free slots.

    With the placement `round-robin`, any machine of a group may have to compute an expert, so the expert is assigned to
    all machines of its group that have free slots. With the placement `finish`, it is assigned to one machine, which
    will then be preferred for this expert.
    """
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
    """Return copies of `tokens` with random predictions. Each chosen expert is predicted with the probability `recall`;
    otherwise another expert is predicted in its place. With the same probability the draft model's own token is right.
    Equal seeds give equal results."""
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
    """Return the tokens that a trace's decode steps process. The trace must have one sequence and every layer in each
    step. `named`: the experts that were predicted for each routing; None: no predictions."""
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
