"""Many simulations in parallel: a process for each core, results in order; stored ones are not made again."""

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
"""That one process can wait for there."""


class ResultStore(Protocol[Stored]):
    """Where results outlive an interrupt."""

    def find(self, setting: object) -> Stored | None:
        """The result of a setting, if it was stored."""

    def keep(self, setting: object, result: Stored) -> None:
        """Whole or not at all; where nothing can be stored, nothing happens."""


def sweep(
    simulate: Callable[[Setting], Result],
    settings: Sequence[Setting],
    tick: Callable[[int], None],
    processes: int | None = None,
    keeping: ResultStore[Result] | None = None,
) -> list[Result]:
    """What `simulate`, a function of a module, makes of every setting; `tick` hears of each that is done.

    `processes`: so many at most, with 1 none but this one; None: one for each core of the machine. Results are stored
    by `keeping` as they come, and those that it has are not made again. The first exception of a simulation, or an
    interrupt, ends them all.
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
    with _in_python_s_folder() as folder:  # of its own process, too, which watches over locks
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
    """Stored results by the numbers of their settings."""
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
    """Processes that are started meanwhile find nothing on their path but Python's own modules, until they have got
    ours: they begin with the folder that they are started in. Gives the folder in which we work otherwise."""
    before = Path.cwd()
    os.chdir(Path(os.__file__).parent)
    try:
        yield before
    finally:
        os.chdir(before)


def _follow_parent(folder: Path) -> None:
    """Work in that folder. Ctrl-C ends this process without a word, and so does the end of the one that started it."""
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
