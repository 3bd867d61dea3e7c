"""What a cluster would do for a model, before it is bought or built: `smoe cluster plan`, by simulation.

    main: the pieces of `smoe plan` -----------------------+
    workers: measured, a profile's CPU, or like main ------+--> `simulator/cluster_forecast.py`, 1 .. N workers,
    routing: a recorded run, or drawn ---------------------+    by each of `SCHEDULES`

One sequence, decode steps alone. Not simulated: workers that fail, other work on the machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from smoe.report.cluster_shadows import beside_shadows, of_one_machine
from smoe.report.forecast import survey_of
from smoe.report.on_clock import Work, times_for
from smoe.report.outlook import Case
from smoe.routing import Routing
from smoe.simulator.cluster import DecodedToken
from smoe.simulator.cluster_forecast import (
    MeasuredMain,
    MeasuredWorker,
    Port,
    decoded_tokens,
    foretell,
    named_at,
)
from smoe.simulator.cluster_ours import OurRun, TokenWaits
from smoe.simulator.cluster_shadow import ShadowTimes
from smoe.simulator.synthetic import SAYS, TYPICAL, DrawnShape, synthesise
from smoe.units import format_seconds

WAY_SECONDS, MESSAGE_SECONDS, HANDING_SECONDS = 1.0e-3, 0.05e-3, 0.1e-3
"""The round trip to a worker without the wire's time, its threads' waking up included; of it what main does for each
message, one after the other; and handing an expert from thread to thread at the worker, which main does not count as
computing: measured on two cores (docs/log/cluster.md)."""
ENOUGH = 0.05
"""By less than this share of the best time more workers do not pay."""
_BEFORE, _WARM_UP, _STEPS = 256, 4, 16
"""Decode steps: what filled the slots, some that do not count, those that do."""
_SHADOW_RECALL, _GATE_RECALL = {"int8": 0.995, "int4": 0.979, "int3": 0.964, "int2": 0.944}, 0.78
"""Of experts named by a draft model, aligned at every token (docs/papers/od-moe.md), and by the next gate."""
_SHADOW_SHARE = 0.5
"""Of an expert's time, in half the bytes."""

SCHEDULES = {
    "finish": "every expert where it finishes first",
    "cluster": "the same with a draft model: `preset` cluster",
    "round-robin": "workers in turn, with a draft model: `preset` od-moe",
}
"""A description of the forecast."""


@dataclass(frozen=True)
class Network:
    """What lies between the machines."""

    bytes_per_second: float
    way: float = WAY_SECONDS
    message: float = MESSAGE_SECONDS


@dataclass(frozen=True)
class ClusterCase:
    """So many workers, by one schedule."""

    workers: int
    schedule: str
    """One of `SCHEDULES`."""
    seconds_per_token: float
    waits: TokenWaits
    """Seconds of a token."""
    loads_at_workers: float
    """A token."""
    loads_at_main: float

    @property
    def placement(self) -> str:
        return "round-robin" if self.schedule == "round-robin" else "finish"

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds_per_token

    @property
    def waits_for(self) -> str:
        """What takes most of a token."""
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
"""`TokenWaits` for people."""


@dataclass(frozen=True)
class ClusterOutlook:
    """What to expect."""

    model: str
    alone: Case
    """Main without workers."""
    main: MeasuredMain
    beside_shadow: MeasuredMain | None
    """Main where it has a shadow, which leaves room for fewer experts; None: there is no room for a shadow."""
    workers: list[MeasuredWorker]
    network: Network
    cases: list[ClusterCase]
    share_held: float
    """Of the experts those that main and all workers have room for."""
    remarks: list[str]

    @property
    def schedules(self) -> list[str]:
        """Those that main has room for."""
        return list(dict.fromkeys(case.schedule for case in self.cases))

    def of(self, schedule: str) -> list[ClusterCase]:
        """Ascending by workers."""
        return [case for case in self.cases if case.schedule == schedule]

    def enough(self, schedule: str) -> int:
        """The least number of workers that is within `ENOUGH` of the best; 0: main alone is."""
        took = [self.alone.run.seconds_per_token, *(case.seconds_per_token for case in self.of(schedule))]
        return next(workers for workers, seconds in enumerate(took) if seconds <= (1 + ENOUGH) * min(took))

    def as_json(self) -> dict[str, Any]:
        """What `smoe cluster plan --json` prints."""
        return {
            "model": self.model,
            "alone_seconds_per_token": self.alone.run.seconds_per_token,
            "main": asdict(self.main),
            "main_beside_shadow": None if self.beside_shadow is None else asdict(self.beside_shadow),
            "workers": [asdict(worker) for worker in self.workers],
            "network": asdict(self.network),
            "share_of_experts_held": self.share_held,
            "cases": [case.as_json() for case in self.cases],
            "enough_workers": {schedule: self.enough(schedule) for schedule in self.schedules},
            "remarks": self.remarks,
        }


@dataclass(frozen=True)
class Wanted:
    """What to forecast."""

    workers: int
    """Up to so many."""
    measured: Sequence[MeasuredWorker] = ()
    """Those that there are; more than these are like the mean of them. Empty: there are none yet."""
    profile: DeviceProfile | None = None
    """Of workers that there are not; None: as main."""
    worker_bytes: int = 0
    """Of experts in each of these,"""
    slots: int | None = None
    """or so many of them."""


def cluster_outlook(
    model: str,
    config: EngineConfig,
    wanted: Wanted,
    network: Network,
    trace: Sequence[Routing] | None = None,
    revision: str | None = None,
    tick: Callable[[], None] = lambda: None,
) -> ClusterOutlook:
    """Simulate all of it: some seconds; `tick` hears of each case. `config` is main's, whose presets cluster and od-moe
    say how its shadows are to be; `trace`: a recorded run of the model, None: one is drawn. Raises `ConfigError` where
    a rate is not known, `BudgetError` where main or a worker has too little memory, `TraceError` where the trace is of
    another model."""
    config, shadows = of_one_machine(config)
    survey = survey_of(model, config, revision)
    if survey.subject is None:
        raise ConfigError(
            "the rate at which this machine loads experts is not measured; run smoe doctor once, or choose a machine "
            "(`profile`)",
            setting="profile",
            allowed="a machine whose rates are known",
        )
    alone, scene = survey.subject.case(survey.ledger)
    work, pieces = scene.work, alone.run.pieces
    row_bytes = int(survey.spec.config.get_text_config().hidden_size) * survey.spec.dtype.itemsize
    layer, everything = pieces["layer"] + pieces["deciding"], work.layers * work.experts

    def main_with(ledger: Ledger) -> MeasuredMain:
        slots, ahead = min(ledger.cache_slots, everything), max(1, ledger.staging_slots - 1)
        return MeasuredMain(layer, network.message, pieces["load"], pieces["expert"], slots, ahead)

    main = main_with(survey.ledger)
    beside, shadow_remarks = beside_shadows(model, survey, config, shadows, revision)
    shadowed = None if beside is None else main_with(beside)
    workers = list(_workers(wanted, work, survey.ledger.demand.classes, scene.machine, network, row_bytes))
    tokens, before = _replayed(work, trace)
    guesses = survey.subject.predictor_of(survey.spec, config) == "next-gate"
    port = Port(network.bytes_per_second, row_bytes)
    keys = [(n, expert, EXACT) for n in range(work.layers) for expert in range(work.experts)]
    shadow = ShadowTimes(layer + work.top_k * main.expert * _SHADOW_SHARE, kv_period=0)
    named = {name: named_at(tokens, work.experts, _SHADOW_RECALL[precision]) for name, precision in shadows.items()}
    by_gate = named_at(tokens, work.experts, _GATE_RECALL)
    cases = []
    for count in range(1, len(workers) + 1):
        run = partial(foretell, workers=workers[:count], port=port, before=before, everything=keys)
        found = [run(tokens, main, placement="finish")] + [run(by_gate, main, placement="finish")] * guesses
        cases.append(_case(count, "finish", min(found, key=_seconds)))  # a guess that costs is switched off
        if shadowed is not None:
            early = replace(shadow, is_early=True)
            cases.append(_case(count, "cluster", run(named["cluster"], shadowed, placement="finish", shadow=early)))
        by_turns = run(named["round-robin"], main, placement="round-robin", shadow=shadow)
        cases.append(_case(count, "round-robin", by_turns))
        tick()
    held = min(1.0, (main.slots + sum(worker.slots for worker in workers)) / everything)
    remarks = _remarks(wanted, network, trace) + shadow_remarks
    return ClusterOutlook(model, alone, main, shadowed, workers, network, cases, held, remarks)


def _remarks(wanted: Wanted, network: Network, trace: Sequence[Routing] | None) -> list[str]:
    """What the figures hang on."""
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
    """As many as are wanted; of a way that was measured main's part is taken out, which is simulated. Raises
    `BudgetError` for memory that is too little for a worker."""
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
    """Seconds of (a load, an expert): workers compute on their CPUs, and read from their disks."""
    times = times_for(machine, work)
    if not machine.has_link:
        return times.load, times.expert(1) * times.alone
    if machine.disk_bytes_per_second is None:
        raise ConfigError(
            f"`worker_profile` {machine.name} has no rate of the disk from which a worker reads experts; add "
            "disk_bytes_per_second, or choose another profile",
            setting="worker_profile",
            given=machine.name,
            allowed="a profile with disk_bytes_per_second",
        )
    assert times.host is not None, "a machine with a link has a CPU as well"
    return work.expert_bytes / machine.disk_bytes_per_second, times.host(1)


def _replayed(work: Work, trace: Sequence[Routing] | None) -> tuple[list[DecodedToken], list[ExpertKey]]:
    """(the last tokens, all that was used before them)."""
    if trace is None:
        trace = synthesise(DrawnShape(work.experts, work.top_k, work.layers, _BEFORE + _WARM_UP + _STEPS), TYPICAL)
    tokens = decoded_tokens(trace)
    shape = (len(tokens[0].chosen), trace[-1].experts) if tokens else (0, 0)
    if shape != (work.layers, work.experts) or len(tokens) <= _WARM_UP:
        raise TraceError(
            f"the `trace` has {len(tokens)} decode steps of {shape[0]} layers with {shape[1]} experts; this model has "
            f"{work.layers} layers with {work.experts} experts: give a trace of it with at least {_WARM_UP + 1} steps",
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


def _seconds(run: OurRun) -> float:
    counted = run.token_seconds[_WARM_UP:]
    return sum(counted) / len(counted)


def _case(workers: int, schedule: str, run: OurRun) -> ClusterCase:
    counted = len(run.token_seconds) - _WARM_UP
    waits = TokenWaits(*(sum(of) / counted for of in zip(*run.waits[_WARM_UP:], strict=True)))
    there, here = run.loads_since(_WARM_UP)
    return ClusterCase(workers, schedule, _seconds(run), waits, there / counted, here / counted)
