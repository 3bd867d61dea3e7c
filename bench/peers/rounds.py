"""One round: conditions, a fresh process of one engine under one limit, and what came out."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.peers.binaries import BinaryError
from bench.peers.cgroup import MemoryCgroup, MemoryParent
from bench.peers.conditions import (
    Ceilings,
    CpuUse,
    CpuWatch,
    ceilings,
    drop_from_page_cache,
    read_into_page_cache,
    wait_until_quiet,
)
from bench.peers.engines import ENGINES, REPOSITORY, Engine, Setup, worker_environment
from bench.peers.isa import Isa
from bench.peers.neighbour import Neighbour, other_work
from bench.peers.process import Command, Finished, run_process
from bench.peers.shape import Shape
from bench.peers.worker import Measurement, Workload
from smoe.units import format_bytes

DIRECTORIES = re.compile(r"(/[\w.-]+)+/")  # cut from messages: results are published

_OTHER_WORK: dict[Neighbour, str] = {"no": "", "yes": ", one core busy", "bursts": ", bursts of other work"}


@dataclass(frozen=True)
class Case:
    """What engines are measured under."""

    limit_bytes: int | None = None
    """Of the whole process, page cache included; None = unlimited."""
    isa: Isa = "native"
    neighbour: Neighbour = "no"
    """The other work that runs while an engine is measured."""

    def __str__(self) -> str:
        limit = "no limit" if self.limit_bytes is None else f"limit {format_bytes(self.limit_bytes)}"
        isa = "" if self.isa == "native" else f", {self.isa} only"
        return f"{limit}{isa}{_OTHER_WORK[self.neighbour]}"


@dataclass(frozen=True)
class Round:
    """Result of one engine's processes. Without a measurement, `error` says why."""

    engine: str
    case: Case
    pair: int
    measurement: Measurement | None
    error: str | None
    peak_bytes: int | None
    """Highest use of the memory group, page cache included; None when there was no group."""
    ceilings: Ceilings
    """Measured just before the process started."""
    cpu: CpuUse
    """While it ran; a neighbour counts as ours."""

    @property
    def decode_rate(self) -> float:
        """Decoded tokens per second, all tokens."""
        return _rate(self.measured.decode_seconds)

    @property
    def late_decode_rate(self) -> float:
        """Decoded tokens per second, second half: caches have settled."""
        seconds = self.measured.decode_seconds
        return _rate(seconds[len(seconds) // 2 :])

    @property
    def seconds_before_decoding(self) -> float:
        """Seconds from the start of the engine's processes to their end, except decoding: libraries, loading, all
        prompts, and what follows the last token. Of several processes, the time between them counts too."""
        return self.cpu.seconds - sum(self.measured.decode_seconds)

    @property
    def disk_bytes_per_token(self) -> float | None:
        """Bytes fetched from disk per decoded token."""
        total = self.measured.disk_bytes["decode"]
        return None if total is None else total / len(self.measured.decode_seconds)

    @property
    def own_bytes(self) -> int | None:
        """Resident memory after decoding that no file backs: what the kernel could not have taken back."""
        memory = self.measured.memory_bytes
        return memory["RssAnon"] + memory.get("RssShmem", 0) if "RssAnon" in memory else None

    def of_possible(self, shape: Shape) -> float | None:
        """Achieved decode rate over that of a machine that reads *these* bytes one after the other at its ceilings.

        Seconds per token at best = touched bytes / memory rate + disk bytes / disk rate. Above 1 is possible where
        disk and memory overlap. An engine that reads too much is not blamed here but in `disk_bytes_per_token`.
        """
        disk_bytes, disk_rate = self.disk_bytes_per_token, self.ceilings.disk_bytes_per_second
        if disk_bytes is None or (disk_bytes and not disk_rate):
            return None
        disk_seconds = disk_bytes / disk_rate if disk_rate else 0.0
        best_seconds = shape.touched_bytes / self.ceilings.memory_bytes_per_second + disk_seconds
        return self.decode_rate * best_seconds

    @property
    def measured(self) -> Measurement:
        """The measurement of a round known to have one."""
        assert self.measurement is not None, f"round of {self.engine} failed: {self.error}"
        return self.measurement


def _rate(seconds: Sequence[float]) -> float:
    return len(seconds) / sum(seconds)


@dataclass(frozen=True)
class Arena:
    """What stays the same in all rounds of a comparison."""

    setup: Setup
    workload: Workload
    shape: Shape
    parent: MemoryParent | None
    """Where memory groups are made; None = runs are not limited."""
    timeout_seconds: float
    retries: int
    """How often a disturbed round is repeated before it is kept, marked."""
    nice: int = 0
    """Priority of the worker processes; below 0 (root only) they go before everything else on the machine."""


def run_round(arena: Arena, name: str, case: Case, pair: int, logits: Path | None = None) -> Round:
    """Run engine `name` once; again, up to `arena.retries` times, while others disturb it."""
    for _ in range(arena.retries + 1):
        wait_until_quiet()
        result = _run_once(arena, name, case, pair, logits)
        if result.error or not result.cpu.disturbed:
            break
    return result


def _run_once(arena: Arena, name: str, case: Case, pair: int, logits: Path | None) -> Round:
    engine, setup = ENGINES[name], replace(arena.setup, isa=case.isa)
    workload = replace(arena.workload, logits=logits)
    commands = engine.commands(setup, workload, case.limit_bytes)  # reads the file: before it is dropped, and not timed
    if case.limit_bytes is None:
        read_into_page_cache(engine.files(setup))
    else:
        drop_from_page_cache(engine.files(setup))
    possible = ceilings(setup.checkpoint(), arena.shape.expert_bytes, workload.threads)
    group = MemoryCgroup(arena.parent, case.limit_bytes) if arena.parent else None
    try:
        with CpuWatch() as watch, other_work(case.neighbour, arena.nice):
            finished = _run_processes(arena, engine, setup, commands, case, group)
        peak_bytes = group.peak_bytes() if group else None
    finally:
        if group:
            group.close()
    measurement, error = read_result(engine, finished, workload)
    return Round(name, case, pair, measurement, error, peak_bytes, possible, watch.use)


def _run_processes(
    arena: Arena, engine: Engine, setup: Setup, commands: Sequence[Command], case: Case, group: MemoryCgroup | None
) -> list[Finished]:
    """The engine's processes, one after the other, until one fails. Below a limit each starts from the disk."""
    environment = worker_environment(arena.workload.threads, case.isa)
    finished: list[Finished] = []
    with TemporaryDirectory() as empty:
        folder = Path(empty) if engine.variable else REPOSITORY  # programs leave logs where they run
        for command in commands:
            if finished and case.limit_bytes is not None:
                drop_from_page_cache(engine.files(setup))
            finished.append(run_process(command, group, folder, environment, arena.nice, arena.timeout_seconds))
            if finished[-1].status:
                break
    return finished


def read_result(
    engine: Engine, finished: Sequence[Finished], workload: Workload
) -> tuple[Measurement | None, str | None]:
    """(measurement, None) of a good run, (None, reason) of another."""
    last = finished[-1]
    if last.status == 0:
        try:
            return engine.read(finished, workload), None
        except BinaryError as reason:
            return None, str(reason)
    if last.status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return None, "killed by the kernel: needs more memory than the limit"
    last_line = last.errors.strip().splitlines()[-1] if last.errors.strip() else "no message"
    return None, f"exit status {last.status}: {DIRECTORIES.sub('', last_line)}"
