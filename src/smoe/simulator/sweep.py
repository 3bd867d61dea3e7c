"""Runs many simulations in parallel: one process for each core, results in order; stored results are not simulated
again."""

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
"""The maximum number of processes for which one process can wait on Windows."""


class ResultStore(Protocol[Stored]):
    """A store of results that survives an interrupt."""

    def find(self, setting: object) -> Stored | None:
        """Return the stored result of a setting; None where there is none."""

    def keep(self, setting: object, result: Stored) -> None:
        """Store a result atomically; has no effect where nothing can be stored."""


def sweep(
    simulate: Callable[[Setting], Result],
    settings: Sequence[Setting],
    tick: Callable[[int], None],
    processes: int | None = None,
    keeping: ResultStore[Result] | None = None,
) -> list[Result]:
    """Return the results of `simulate`, a function of a module, for every setting; `tick` is called after each.

    `processes`: the maximum number of processes (1: only this one); None: one for each core. `keeping` stores results
    as they come, and stored ones are not simulated again. The first exception of a simulation, or an interrupt, ends
    all of them.
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
    with _in_python_s_folder() as folder:  # also for the pool's process that tracks locks
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
    """Return the stored results by the numbers of their settings."""
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
    """Change to Python's own folder for the duration of the `with` block. Processes that start meanwhile find only
    Python's own modules in their initial folder, until they get our path. Yield the previous folder."""
    before = Path.cwd()
    os.chdir(Path(os.__file__).parent)
    try:
        yield before
    finally:
        os.chdir(before)


def _follow_parent(folder: Path) -> None:
    """Work in that folder. Ctrl-C ends this process silently, and so does the end of its parent."""
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
