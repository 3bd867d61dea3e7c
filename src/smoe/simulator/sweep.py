"""Many simulations beside each other: a process for each core, results in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Setting = TypeVar("Setting")
Result = TypeVar("Result")


def sweep(
    simulate: Callable[[Setting], Result], settings: Sequence[Setting], tick: Callable[[int], None]
) -> list[Result]:
    """What `simulate`, a function of a module, makes of every setting; `tick` hears of each that is done.

    The first exception of a simulation, or an interrupt, ends them all.
    """
    processes, found = min(len(settings), os.cpu_count() or 1), []
    if processes == 1:
        for setting in settings:
            found.append(simulate(setting))
            tick(1)
        return found
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:  # a fork would copy threads of the libraries
        try:
            for result in pool.map(simulate, settings):
                found.append(result)
                tick(1)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found
