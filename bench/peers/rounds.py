"""One round: conditions, a fresh process of one engine under one limit, and what came out."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.peers.cgroup import MemoryCgroup, MemoryParent
from bench.peers.conditions import (
    Ceilings,
    CpuUse,
    CpuWatch,
    ceilings,
    drop_from_page_cache,
    read_into_page_cache,
    set_priority,
    wait_until_quiet,
)
from bench.peers.engines import ENGINES, REPOSITORY, Setup, worker_environment
from bench.peers.shape import ModelShape
from bench.peers.worker import Measurement, Workload

# The shell joins the group before it becomes the worker: nothing the worker allocates escapes the limit.
JOIN_AND_RUN = 'echo $$ > "$0" && exec "$@"'
TIMED_OUT = 124  # exit status, as of timeout(1)
DIRECTORIES = re.compile(r"(/[\w.-]+)+/")  # cut from messages: results are published


@dataclass(frozen=True)
class Round:
    """Result of one process. Without a measurement, `error` says why."""

    engine: str
    limit_bytes: int | None
    pair: int
    measurement: Measurement | None
    error: str | None
    peak_bytes: int | None
    """Highest use of the memory group, page cache included; None when there was no group."""
    ceilings: Ceilings
    """Measured just before the process started."""
    cpu: CpuUse
    """While the process ran."""

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
    def disk_bytes_per_token(self) -> float | None:
        """Bytes fetched from disk per decoded token."""
        total = self.measured.disk_bytes["decode"]
        return None if total is None else total / len(self.measured.decode_seconds)

    @property
    def own_bytes(self) -> int | None:
        """Resident memory after decoding that no file backs: what the kernel could not have taken back."""
        memory = self.measured.memory_bytes
        return memory["RssAnon"] + memory.get("RssShmem", 0) if "RssAnon" in memory else None

    def of_possible(self, shape: ModelShape) -> float | None:
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
    shape: ModelShape
    parent: MemoryParent | None
    """Where memory groups are made; None = runs are not limited."""
    timeout_seconds: float
    retries: int
    """How often a disturbed round is repeated before it is kept, marked."""
    nice: int = 0
    """Priority of the worker processes; below 0 (root only) they go before everything else on the machine."""


def run_round(arena: Arena, name: str, limit_bytes: int | None, pair: int, logits: Path | None = None) -> Round:
    """Run engine `name` once; again, up to `arena.retries` times, while others disturb it."""
    for _ in range(arena.retries + 1):
        wait_until_quiet()
        result = _run_once(arena, name, limit_bytes, pair, logits)
        if result.error or not result.cpu.disturbed:
            break
    return result


def _run_once(arena: Arena, name: str, limit_bytes: int | None, pair: int, logits: Path | None) -> Round:
    engine, setup = ENGINES[name], arena.setup
    workload = replace(arena.workload, logits=logits)
    command = engine.command(setup, workload, limit_bytes)
    if limit_bytes is None:
        read_into_page_cache(engine.files(setup))
    else:
        drop_from_page_cache(engine.files(setup))
    possible = ceilings(setup.checkpoint(), arena.shape.expert_bytes, workload.threads)
    group = MemoryCgroup(arena.parent, limit_bytes) if arena.parent else None
    try:
        with CpuWatch() as watch:
            status, output, errors = _run_process(command, group, arena)
        peak_bytes = group.peak_bytes() if group else None
    finally:
        if group:
            group.close()
    measurement, error = _parse(status, output, errors)
    return Round(name, limit_bytes, pair, measurement, error, peak_bytes, possible, watch.use)


def _run_process(command: Sequence[str], group: MemoryCgroup | None, arena: Arena) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a fresh process, in a session of its own; killed with its children on timeout."""
    if group is not None:
        command = ["sh", "-c", JOIN_AND_RUN, str(group.procs), *command]
    pipe = subprocess.PIPE
    environment = worker_environment(arena.workload.threads)
    process = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=REPOSITORY, env=environment, start_new_session=True
    )
    try:
        if arena.nice:
            set_priority(process.pid, arena.nice)
        output, errors = process.communicate(timeout=arena.timeout_seconds)
        return process.returncode, output, errors
    except subprocess.TimeoutExpired:
        return TIMED_OUT, "", f"stopped after {arena.timeout_seconds:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _parse(status: int, output: str, errors: str) -> tuple[Measurement | None, str | None]:
    """(measurement, None) of a good run, (None, reason) of another."""
    if status == 0:
        return Measurement(**json.loads(output.splitlines()[-1])), None
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return None, "killed by the kernel: needs more memory than the limit"
    last_line = errors.strip().splitlines()[-1] if errors.strip() else "no message"
    return None, f"exit status {status}: {DIRECTORIES.sub('', last_line)}"
