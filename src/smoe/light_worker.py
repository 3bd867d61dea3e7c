"""The process of a cluster worker that runs without torch. `main` runs in a new Python process and reads its task from
an open file.

`smoe cluster join --no-torch` parses its options and then replaces itself by this process, because the command line's
modules take 25 MiB that a worker does not need. The process uses a single heap, because each thread's own heap would
stay at its largest size, and returns free memory to the system.

    smoe cluster join ...   options, keys --exec--> this process: asks the coordinator for the experts' description,
                                                      opens the experts, serves
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from smoe import __version__
from smoe.cluster.stored_identity import KeyPair, Worker, keep_worker
from smoe.errors import SmoeError, WorkerRefusedError
from smoe.kernels import machine_code
from smoe.safe_path import WORKING_FOLDER, child_environment, module_line

_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072", "OPENBLAS_NUM_THREADS": "1"}
_INTERRUPTED, _TERMINATED, _REFUSED = 130, 143, 3


class Task(NamedTuple):
    """What a worker without torch should do: which model to open, with how much memory."""

    place: str
    """The path of the model's folder."""
    memory_bytes: int | None
    """The number of bytes of memory for experts; None: enough for `slots` experts."""
    slots: int | None
    threads: int | None


def become(me: Worker, task: Task, say: Callable[[str], None]) -> None:
    """Replace this process by a new program that runs the worker, so that this call does not return. If the kernels'
    machine code is not available here, run the worker in this process and return."""
    if not machine_code.is_known():
        run(me, task, say)
        return
    reading, writing = os.pipe()
    task = task._replace(place=str(Path(task.place).absolute()))
    # through a pipe, because the keys must not appear in the process list
    os.write(writing, json.dumps([asdict(me), task._asdict()]).encode())
    os.close(writing)
    os.set_inheritable(reading, True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    environment = child_environment() | _ENVIRONMENT  # before the current folder changes
    os.chdir(WORKING_FOLDER)
    os.execve(sys.executable, module_line("smoe.light_worker", str(reading)), environment)


class EndingFlag:
    """Ends the worker after a signal, by a flag: an exception that a signal handler raises may be lost in a library's
    callback, and the worker would go on. A second signal raises `KeyboardInterrupt` at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The number of the first signal; None before it."""
        self._end: Callable[[], None] = lambda: None

    def on_signal(self, number: int, _: object) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        self._end()

    def call(self, end: Callable[[], None]) -> None:
        """Let the first signal call `end` too."""
        self._end = end

    def check(self) -> None:
        """Raise `KeyboardInterrupt` after a signal."""
        if self.signal is not None:
            raise KeyboardInterrupt


def run(me: Worker, task: Task, say: Callable[[str], None], ending: EndingFlag | None = None) -> None:
    """Run the worker until Ctrl-C, until `ending` ends it, or until the coordinator refuses it. `say` is called with
    progress messages."""
    from smoe.cluster.described import ask
    from smoe.cluster.worker import WorkerProcess
    from smoe.load.light_experts import fields_of, open_described
    from smoe.units import format_bytes

    def changed(words: str) -> None:
        say(f"worker {me.name}: {words}")
        if me.code is not None:
            keep_worker(replace(me, code=None))

    ending = ending or EndingFlag()
    place = Path(task.place)
    fields = {"smoe": __version__, "name": me.name, "code": me.code} | fields_of(place)
    say(f"worker {me.name}: waits for the coordinator at {me.address} to describe the model's experts")
    opened = open_described(place, ask(me, fields, ending.check), task.memory_bytes, task.slots, task.threads)
    say(f"worker {me.name}: {opened.alone.slots} experts fit, in {format_bytes(opened.alone.nbytes)}")
    worker = WorkerProcess(me, opened, changed)
    ending.call(worker.end)
    try:
        ending.check()
        worker.serve()
    finally:
        opened.alone.close()


def main() -> NoReturn:
    """Run the worker described in the open file whose descriptor is the first argument of the command line."""
    with os.fdopen(int(sys.argv[1]), encoding="utf8") as file:
        worker, task = json.load(file)
    me = Worker(**worker | {"keys": KeyPair(**worker["keys"])})
    ending = EndingFlag()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ending.on_signal)
    try:
        run(me, Task(**task), lambda words: print(words, file=sys.stderr, flush=True), ending)
        ending.check()
    except KeyboardInterrupt:
        print(f"warning: worker {me.name} has ended", file=sys.stderr)
        sys.exit(_TERMINATED if ending.signal == signal.SIGTERM else _INTERRUPTED)
    except SmoeError as error:
        from smoe.cli.console import complain

        complain(error)
        sys.exit(_REFUSED if isinstance(error, WorkerRefusedError) else 2)
    sys.exit(0)
