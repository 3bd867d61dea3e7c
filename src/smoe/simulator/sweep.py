"""Many simulations beside each other: a process for each core, results in order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from typing import TypeVar

Setting = TypeVar("Setting")
Result = TypeVar("Result")


def sweep(
    simulate: Callable[[Setting], Result],
    settings: Sequence[Setting],
    tick: Callable[[int], None],
    processes: int | None = None,
) -> list[Result]:
    """What `simulate`, a function of a module, makes of every setting; `tick` hears of each that is done.

    `processes`: so many at most, with 1 none but this one; None: one for each core. The first exception of a
    simulation, or an interrupt, ends them all.
    """
    most, found = min(len(settings), processes or os.cpu_count() or 1), []
    if most == 1:
        for setting in settings:
            found.append(simulate(setting))
            tick(1)
        return found
    spawn = get_context("spawn")  # a fork would copy threads of the libraries
    with ProcessPoolExecutor(most, spawn, initializer=_follow_parent) as pool:
        try:
            for result in pool.map(simulate, settings):
                found.append(result)
                tick(1)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def _follow_parent() -> None:
    """Ctrl-C ends this process without a word, and so does the end of the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
