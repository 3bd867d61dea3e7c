"""Runs a worker: `smoe cluster join`, and the workers of `smoe cluster up`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from smoe.errors import ConfigError
from smoe.units import format_bytes, format_count, parse_bytes

if TYPE_CHECKING:
    from smoe.cluster.stored_identity import Worker
    from smoe.cluster.talking import Talking

DEFAULT_WORKER_MEMORY = "512MiB"
Torch = Annotated[
    bool | None,
    typer.Option(
        "--torch/--no-torch",
        help="--torch: torch computes a worker's experts. --no-torch: smoe's own kernels compute them; the worker "
        "then needs a tenth of the memory, but works only for bf16 experts on Linux. \\[default: with torch if it is "
        "installed]",
    ),
]


class WorkerRoom(NamedTuple):
    """The limit of the experts in a worker's memory: their bytes or their number."""

    memory_bytes: int | None
    slots: int | None

    @classmethod
    def of(cls, worker_memory: str | None, slots: int | None) -> WorkerRoom:
        """Return the limit that the command line options give. Raises `ConfigError` if both bytes and number are
        given."""
        if slots is None:
            return cls(parse_bytes(worker_memory or DEFAULT_WORKER_MEMORY, "worker_memory"), None)
        if worker_memory is not None:
            raise ConfigError(
                f"`worker_memory={worker_memory}` and `slots={slots}` both set how many experts a worker holds; leave "
                "out one of the two",
                setting="slots",
                given=slots,
                allowed="only without `worker_memory`",
            )
        return cls(None, slots)

    @property
    def as_given(self) -> list[str]:
        """The limit as command line options."""
        return ["--worker-memory", str(self.memory_bytes)] if self.slots is None else ["--slots", str(self.slots)]


def check(model: str, room: WorkerRoom, precision: str, torch: bool | None) -> None:
    """Raise the errors that a worker would raise when it starts, before any worker is started."""
    from smoe.presets import configure

    config = configure(precision=precision)
    if not _has_torch(torch):
        from smoe.load.light_experts import place_of

        place_of(model, precision)
        return
    from smoe.load.worker_experts import open_experts

    open_experts(model, room.memory_bytes, config, room.slots).alone.close()


def be_worker(
    me: Worker, model: str, room: WorkerRoom, threads: int | None, precision: str, torch: bool | None
) -> None:
    """Run a worker until Ctrl-C, SIGTERM, or a refusal of the coordinator."""
    from smoe.cli.console import note, warn
    from smoe.cluster.address import to_connect_to
    from smoe.machine.available_memory import shortage

    to_connect_to(me.address)  # refuse a name that does not resolve before reading files
    short = None if room.memory_bytes is None else shortage("`worker_memory`", room.memory_bytes)
    if short is not None:
        warn(short)
    try:
        if _has_torch(torch):
            _serve(me, model, room, threads, precision)
        else:
            from smoe.light_worker import Task, become
            from smoe.load.light_experts import place_of

            become(me, Task(str(place_of(model, precision)), *room, threads), note)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"worker {me.name} has ended") from None


def _has_torch(torch: bool | None) -> bool:
    """Return whether the worker uses torch: as the option says, else whether torch is installed."""
    from importlib.util import find_spec

    return find_spec("torch") is not None if torch is None else torch


def _serve(me: Worker, model: str, room: WorkerRoom, threads: int | None, precision: str) -> None:
    """Run a worker with torch, in this process."""
    from dataclasses import replace

    from smoe.cli.console import note
    from smoe.cluster.stored_identity import keep_worker
    from smoe.cluster.worker import WorkerProcess
    from smoe.load.worker_experts import open_experts
    from smoe.machine.processor import set_compute_threads
    from smoe.presets import configure

    set_compute_threads(threads)
    opened = open_experts(model, room.memory_bytes, configure(precision=precision), room.slots)
    held = f"{format_count(opened.alone.slots, 'expert')} ({format_bytes(opened.alone.nbytes)})"
    note(f"worker {me.name}: ready, with room for {held}; waiting for the coordinator at {me.address}")

    def changed(words: str) -> None:
        note(f"worker {me.name}: {words}")
        if me.code is not None:
            keep_worker(replace(me, code=None))

    try:
        serve_until_signal(WorkerProcess(me, opened, changed))
    finally:
        opened.alone.close()


def serve_until_signal(talking: Talking) -> None:
    """Run `serve` until a signal. The first signal ends the loop of `serve` between two of its turns, because a
    library's callback might swallow an exception within a turn. A second signal raises `KeyboardInterrupt` at once."""
    from smoe.cli.interrupts import answered_by, check

    def on_signal(_: int) -> None:
        if talking.is_ending:
            raise KeyboardInterrupt
        talking.end()

    with answered_by(on_signal):
        talking.serve()
    check()
