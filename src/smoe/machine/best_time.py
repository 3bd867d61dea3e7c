"""Measures the best time of a piece of work, as an estimate of the hardware's limit."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any


def best_time(action: Callable[[], Any], seconds: float) -> float:
    """Return the shortest duration of a run of `action`, in seconds. It runs as often as fits into `seconds`, after one
    run for warming up."""
    action()
    best, started = float("inf"), perf_counter()
    while perf_counter() - started < seconds or best == float("inf"):
        before = perf_counter()
        action()
        best = min(best, perf_counter() - before)
    return best


def ranked_time(action: Callable[[], Any], seconds: float, rank: float) -> float:
    """Return the duration of one of the runs of `action`, in seconds; the fraction `rank` of the runs is shorter. It
    runs as often as fits into `seconds`, at least once."""
    found = list[float]()
    started = perf_counter()
    while not found or perf_counter() - started < seconds:
        before = perf_counter()
        action()
        found.append(perf_counter() - before)
    return sorted(found)[int(rank * len(found))]
