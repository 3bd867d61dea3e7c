"""Forecasts a cluster's speed for a model by simulation (`smoe cluster plan`), before it is bought or built.

    coordinator: the times of `smoe plan` ----------------------+
    workers: measured, a profile's CPU, or as the coordinator --+--> `simulator/cluster_forecast.py`, 1 .. N workers,
    routing: a recorded run, or drawn --------------------------+    by each of `SCHEDULES`

The forecast simulates the decode steps of one sequence, without failures of workers or other work on the machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from smoe.config import EngineConfig
from smoe.errors import ConfigError, TraceError
from smoe.expert import EXACT, ExpertKey
from smoe.load.host_slots import worker_sizes
from smoe.memory.emulation import DeviceProfile
from smoe.policy.budget import Ledger, SlotClass
from smoe.report.cluster_drafts import of_one_machine, with_drafts
from smoe.report.forecast import survey_of
from smoe.report.outlook import Case
from smoe.report.step_times import Work, times_for
from smoe.routing import Routing
from smoe.simulator.cluster import DecodedToken, SimulatedRun, TokenWaits
from smoe.simulator.cluster_draft import DraftTimes
from smoe.simulator.cluster_forecast import (
    MeasuredCoordinator,
    MeasuredWorker,
    Port,
    decoded_tokens,
    foretell,
    named_at,
)
from smoe.simulator.synthetic import SAYS, TYPICAL, DrawnShape, synthesise
from smoe.units import format_seconds

WAY_SECONDS, MESSAGE_SECONDS, HANDING_SECONDS = 1.0e-3, 0.05e-3, 0.1e-3
"""Times in seconds, measured on two cores (docs/log/cluster.md). The first: the round trip of a message without the
time of its bytes, including the wake-up of threads. The second: the coordinator's time within this round trip. The
third: passing an expert between a worker's threads."""
ENOUGH = 0.05
"""There are enough workers if their time per token exceeds the best time by at most this fraction."""
_BEFORE, _WARM_UP, _STEPS = 256, 4, 16
"""The numbers of decode steps: those that fill the slots, warm-up steps that do not count, and counted ones."""
_DRAFT_RECALL, _GATE_RECALL = {"int8": 0.995, "int4": 0.979, "int3": 0.964, "int2": 0.944}, 0.78
"""The recall of predictions by a draft model that is aligned at every token (docs/papers/od-moe.md), and by the next
gate."""
_DRAFT_SHARE = 0.5
"""A draft model's time for an expert, as a fraction of the model's own time, since the expert has about half the
bytes."""

SCHEDULES = {
    "finish": "every expert where it finishes first",
    "cluster": "the same with a draft model: `preset` cluster",
    "round-robin": "workers in turn, with a draft model: `preset=od-moe`",
}
"""The compared schedules: names, and descriptions in words."""


@dataclass(frozen=True)
class Network:
    """The network between the machines: its rate in bytes per second, and the times explained at `WAY_SECONDS` and
    `MESSAGE_SECONDS`."""

    bytes_per_second: float
    way: float = WAY_SECONDS
    message: float = MESSAGE_SECONDS


@dataclass(frozen=True)
class ClusterCase:
    """The forecast for one number of workers and one schedule."""

    workers: int
    schedule: str
    """One of `SCHEDULES`."""
    seconds_per_token: float
    waits: TokenWaits
    """The times of which `seconds_per_token` consists."""
    loads_at_workers: float
    """The number of loads per token at workers."""
    loads_at_main: float

    @property
    def placement(self) -> str:
        return "round-robin" if self.schedule == "round-robin" else "finish"

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds_per_token

    @property
    def waits_for(self) -> str:
        """A description of the field of `waits` that takes most of a token's time."""
        return WORDS[max(TokenWaits._fields, key=self.waits._asdict().__getitem__)]

    def as_json(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "schedule": self.schedule,
            "placement": self.placement,
            "seconds_per_token": self.seconds_per_token,
            "tokens_per_second": self.tokens_per_second,
            "seconds_by_part": self.waits._asdict(),
            "waits_for": self.waits_for,
            "loads_at_workers": self.loads_at_workers,
            "loads_at_main": self.loads_at_main,
        }


WORDS = {
    "main": "coordinator's layers",
    "between": "round trips to workers",
    "computing": "experts computed",
    "loads": "loads at workers",
    "own_loads": "coordinator's loads",
}
"""A description of each field of `TokenWaits`, for people."""


@dataclass(frozen=True)
class ClusterOutlook:
    """The forecasts of a cluster's speed, for several numbers of workers and several schedules."""

    model: str
    alone: Case
    """The forecast for the coordinator without workers."""
    coordinator: MeasuredCoordinator
    with_draft: MeasuredCoordinator | None
    """The forecast for the coordinator with a draft model, which leaves room for fewer experts. None: there is no room
    for a draft model."""
    workers: list[MeasuredWorker]
    network: Network
    cases: list[ClusterCase]
    share_held: float
    """The share of all experts that fit into the memory of the coordinator and all workers together."""
    remarks: list[str]

    @property
    def schedules(self) -> list[str]:
        """The schedules (one of `SCHEDULES`) for which the coordinator has enough memory."""
        return list(dict.fromkeys(case.schedule for case in self.cases))

    def of(self, schedule: str) -> list[ClusterCase]:
        """Return the forecasts for a schedule, in ascending order of the number of workers."""
        return [case for case in self.cases if case.schedule == schedule]

    def fastest(self, schedule: str) -> ClusterCase:
        """Return the forecast for the number of workers with the shortest time per token."""
        return min(self.of(schedule), key=lambda case: case.seconds_per_token)

    def enough(self, schedule: str) -> int:
        """Return the smallest number of workers whose time per token is within the fraction `ENOUGH` of the best time.
        0: the coordinator alone is as fast, or faster."""
        took = [self.alone.run.seconds_per_token, *(case.seconds_per_token for case in self.of(schedule))]
        return next(workers for workers, seconds in enumerate(took) if seconds <= (1 + ENOUGH) * min(took))

    def as_json(self) -> dict[str, Any]:
        """Return the output of `smoe cluster plan --json`."""
        return {
            "model": self.model,
            "alone_seconds_per_token": self.alone.run.seconds_per_token,
            "main": asdict(self.coordinator),
            "main_beside_shadow": None if self.with_draft is None else asdict(self.with_draft),
            "workers": [asdict(worker) for worker in self.workers],
            "network": asdict(self.network),
            "share_of_experts_held": self.share_held,
            "cases": [case.as_json() for case in self.cases],
            "enough_workers": {schedule: self.enough(schedule) for schedule in self.schedules},
            "remarks": self.remarks,
        }


@dataclass(frozen=True)
class Wanted:
    """The description of the workers for which a forecast is wanted."""

    workers: int
    """The maximum number of workers."""
    measured: Sequence[MeasuredWorker] = ()
    """The measured times of existing workers. Further workers are simulated with the mean of these times. Empty: no
    worker was measured."""
    profile: DeviceProfile | None = None
    """The machine of workers that do not exist yet; None: the same machine as the coordinator's."""
    worker_bytes: int = 0
    """The memory for experts, in bytes, of each worker that does not exist yet."""
    slots: int | None = None
    """The number of experts that each of these workers holds, in place of `worker_bytes`."""


def cluster_outlook(
    model: str,
    config: EngineConfig,
    wanted: Wanted,
    network: Network,
    trace: Sequence[Routing] | None = None,
    revision: str | None = None,
) -> ClusterOutlook:
    """Return the forecasts for all numbers of workers and schedules. The simulations take some seconds. `config`: the
    coordinator's settings. `trace`: a recorded run of the model; None: a synthetic trace. Raises `ConfigError` for an
    unknown rate, `BudgetError` if a machine has too little memory, and `TraceError` for a trace of another model."""
    config, drafts = of_one_machine(config)
    survey = survey_of(model, config, revision)
    if survey.subject is None:
        raise ConfigError(
            "the rate at which this machine loads experts has not been measured; run smoe doctor once, or choose a "
            "described machine (`profile`)",
            setting="profile",
            allowed="a machine whose rates are known",
        )
    alone, scene = survey.subject.case(survey.ledger)
    work, pieces = scene.work, alone.run.pieces
    row_bytes = int(survey.spec.config.get_text_config().hidden_size) * survey.spec.dtype.itemsize
    layer, everything = pieces["layer"] + pieces["deciding"], work.layers * work.experts

    def coordinator_with(ledger: Ledger) -> MeasuredCoordinator:
        slots, ahead = min(ledger.cache_slots, everything), max(1, ledger.staging_slots - 1)
        return MeasuredCoordinator(layer, network.message, pieces["load"], pieces["expert"], slots, ahead)

    coordinator = coordinator_with(survey.ledger)
    ledger_with_draft, draft_remarks = with_drafts(model, survey, config, drafts, revision)
    with_draft = None if ledger_with_draft is None else coordinator_with(ledger_with_draft)
    workers = list(_workers(wanted, work, survey.ledger.demand.classes, scene.machine, network, row_bytes))
    tokens, before = _replayed(work, trace)
    guesses = survey.subject.predictor_of(survey.spec, config) == "next-gate"
    port = Port(network.bytes_per_second, row_bytes)
    keys = [(n, expert, EXACT) for n in range(work.layers) for expert in range(work.experts)]
    draft = DraftTimes(layer + work.top_k * coordinator.expert * _DRAFT_SHARE)
    named = {name: named_at(tokens, work.experts, _DRAFT_RECALL[precision]) for name, precision in drafts.items()}
    by_gate = named_at(tokens, work.experts, _GATE_RECALL)
    cases = []
    for count in range(1, len(workers) + 1):
        run = partial(foretell, workers=workers[:count], port=port, before=before, everything=keys)
        found = [run(tokens, coordinator, placement="finish")] + [
            run(by_gate, coordinator, placement="finish")
        ] * guesses
        cases.append(_case(count, "finish", min(found, key=_seconds)))  # prefetching that costs time is switched off
        if with_draft is not None:
            early = replace(draft, is_early=True)
            cases.append(_case(count, "cluster", run(named["cluster"], with_draft, placement="finish", draft=early)))
        by_turns = run(named["round-robin"], coordinator, placement="round-robin", draft=draft)
        cases.append(_case(count, "round-robin", by_turns))
    held = min(1.0, (coordinator.slots + sum(worker.slots for worker in workers)) / everything)
    remarks = _remarks(wanted, network, trace) + draft_remarks
    return ClusterOutlook(model, alone, coordinator, with_draft, workers, network, cases, held, remarks)


def _remarks(wanted: Wanted, network: Network, trace: Sequence[Routing] | None) -> list[str]:
    """Return the assumptions of the forecast, one sentence each."""
    found = [] if trace is not None else [SAYS]
    if not wanted.measured:
        found.append(
            f"a round trip to a worker is assumed to take {format_seconds(network.way)} in addition to the transfer; "
            f"the coordinator spends {format_seconds(network.message)} of it on each message"
        )
    return found


def _workers(
    wanted: Wanted,
    work: Work,
    classes: Sequence[SlotClass],
    machine: DeviceProfile,
    network: Network,
    row_bytes: int,
) -> Iterator[MeasuredWorker]:
    """Yield the times and slots of as many workers as requested. A measured round trip includes the coordinator's own
    time, which is subtracted, because it is simulated separately.

    Raises `BudgetError` for a worker with too little memory.
    """
    mine = 2 * network.message + 2 * row_bytes / network.bytes_per_second
    known = [
        replace(each, hop=max(0.0, each.hop - mine), expert=each.expert + HANDING_SECONDS)
        for each in wanted.measured[: wanted.workers]
    ]
    yield from known
    if known:
        others = MeasuredWorker(
            fmean(each.load for each in known),
            fmean(each.expert for each in known),
            fmean(each.hop for each in known),
            round(fmean(each.slots for each in known)),
        )
    else:
        worker_bytes = None if wanted.slots is not None else wanted.worker_bytes
        slots = sum(count for count, _ in worker_sizes(classes, worker_bytes, wanted.slots))
        load, expert = _on_its_cpu(wanted.profile or machine, work)
        slots = min(slots, work.layers * work.experts)
        others = MeasuredWorker(load, expert + HANDING_SECONDS, max(0.0, network.way - 2 * network.message), slots)
    yield from [others] * (wanted.workers - len(known))


def _on_its_cpu(machine: DeviceProfile, work: Work) -> tuple[float, float]:
    """Return the seconds of a load and the seconds of an expert on a worker, which reads from its disk and computes on
    its CPU."""
    times = times_for(machine, work)
    if not machine.has_link:
        return times.load, times.expert(1) * times.alone
    if machine.disk_bytes_per_second is None:
        raise ConfigError(
            f"`worker_profile={machine.name}` has no rate of the disk from which a worker reads experts; add the "
            "field disk_bytes_per_second to the profile, or choose another profile",
            setting="worker_profile",
            given=machine.name,
            allowed="a profile with disk_bytes_per_second",
        )
    assert times.host is not None, "a machine with a link has a CPU as well"
    return work.expert_bytes / machine.disk_bytes_per_second, times.host(1)


def _replayed(work: Work, trace: Sequence[Routing] | None) -> tuple[list[DecodedToken], list[ExpertKey]]:
    """Return (the last tokens of a trace, which are simulated; the experts used before them, which fill the slots).

    Raises `TraceError` for a trace of another model.
    """
    if trace is None:
        trace = synthesise(DrawnShape(work.experts, work.top_k, work.layers, _BEFORE + _WARM_UP + _STEPS), TYPICAL)
    tokens = decoded_tokens(trace)
    shape = (len(tokens[0].chosen), trace[-1].experts) if tokens else (0, 0)
    if shape != (work.layers, work.experts) or len(tokens) <= _WARM_UP:
        raise TraceError(
            f"the `trace` has {len(tokens)} decode steps of {shape[0]} layers with {shape[1]} experts; this model "
            f"has {work.layers} layers with {work.experts} experts: give a trace of this model with at least "
            f"{_WARM_UP + 1} steps",
            setting="trace",
            allowed="a recorded run of this model",
        )
    begin = max(0, len(tokens) - _WARM_UP - _STEPS)
    before = [
        (layer, expert, EXACT)
        for token in tokens[:begin]
        for layer, chosen in enumerate(token.chosen)
        for expert in chosen
    ]
    return tokens[begin:], before


def _seconds(run: SimulatedRun) -> float:
    counted = run.token_seconds[_WARM_UP:]
    return sum(counted) / len(counted)


def _case(workers: int, schedule: str, run: SimulatedRun) -> ClusterCase:
    counted = len(run.token_seconds) - _WARM_UP
    waits = TokenWaits(*(sum(of) / counted for of in zip(*run.waits[_WARM_UP:], strict=True)))
    there, here = run.loads_since(_WARM_UP)
    return ClusterCase(workers, schedule, _seconds(run), waits, there / counted, here / counted)
