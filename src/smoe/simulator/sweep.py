"""Runs many simulations in parallel, one process for each core. Results are returned in the order of the settings;
stored results are not computed again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Protocol, TypeVar

Setting = TypeVar("Setting")
Result = TypeVar("Result")
Stored = TypeVar("Stored")

_MOST_PROCESSES = 61 if sys.platform == "win32" else 10_000
"""The largest number of processes. On Windows, one process can wait for no more."""


class ResultStore(Protocol[Stored]):
    """A store of results on disk, which an interrupt does not damage."""

    def find(self, setting: object) -> Stored | None:
        """Return the stored result for a setting; None if there is none."""

    def keep(self, setting: object, result: Stored) -> None:
        """Store a result atomically, if results can be stored at all."""


def sweep(
    simulate: Callable[[Setting], Result],
    settings: Sequence[Setting],
    tick: Callable[[int], None],
    processes: int | None = None,
    keeping: ResultStore[Result] | None = None,
) -> list[Result]:
    """Return the results of `simulate`, a function at the top level of a module, for every setting. `tick` is called
    with 1 after each.

    `processes`: the largest number of processes (1: only this one); None: one for each core. `keeping`: stores results
    as soon as they are computed; settings whose results it has are not simulated again. The first exception of a
    simulation, or an interrupt, ends all simulations.
    """
    found = {} if keeping is None else _stored(keeping, settings, tick)
    missing = [number for number in range(len(settings)) if number not in found]
    most = min(len(missing), processes or os.cpu_count() or 1, _MOST_PROCESSES)
    if most <= 1:
        for number in missing:
            found[number] = simulate(settings[number])
            if keeping is not None:
                keeping.keep(settings[number], found[number])
            tick(1)
        return [found[number] for number in range(len(settings))]
    spawn = get_context("spawn")  # a fork would copy threads of the libraries
    with _in_python_s_folder() as folder:  # the pool also starts a process that tracks locks
        pool = ProcessPoolExecutor(most, spawn, initializer=_follow_parent, initargs=(folder,))
    with pool:
        try:
            with _in_python_s_folder():
                futures = {number: pool.submit(simulate, settings[number]) for number in missing}
            for number, future in futures.items():
                if keeping is not None:  # as soon as it is done, though earlier ones are not
                    future.add_done_callback(partial(_keep, keeping, settings[number]))
            for number, future in futures.items():
                found[number] = future.result()
                tick(1)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [found[number] for number in range(len(settings))]


def _stored(
    keeping: ResultStore[Result], settings: Sequence[Setting], tick: Callable[[int], None]
) -> dict[int, Result]:
    """Return {number of a setting: its result} for the settings whose results are stored."""
    found = {}
    for number, setting in enumerate(settings):
        result = keeping.find(setting)
        if result is not None:
            found[number] = result
            tick(1)
    return found


def _keep(keeping: ResultStore[Result], setting: Setting, done: Future[Result]) -> None:
    if not done.cancelled() and done.exception() is None:
        keeping.keep(setting, done.result())


@contextmanager
def _in_python_s_folder() -> Iterator[Path]:
    """Change to the folder of Python's standard library during the `with` block, and yield the previous folder.
    Processes that are started in the block would import modules from the current folder. They must find only Python's
    own modules there until they have received our `sys.path`."""
    before = Path.cwd()
    os.chdir(Path(os.__file__).parent)
    try:
        yield before
    finally:
        os.chdir(before)


def _follow_parent(folder: Path) -> None:
    """Prepare a new process: change to `folder`, and end silently on Ctrl-C or when the parent process ends."""
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
