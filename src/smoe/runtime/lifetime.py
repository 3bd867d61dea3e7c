"""Stops an engine's threads and frees its memory, also when it was never closed.

Threads are never collected, and keep what they work on. So they hold no engine and no model, and an engine that is
collected without `close()` has them ended.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from smoe.memory.arena import Arena
from smoe.memory.reading_threads import Transfers

_living: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines that Python has not collected, closed or not."""
_releasing: list[threading.Thread] = []
"""At work for engines that were collected without having been closed."""


class Helpers(Protocol):
    """Threads that compute."""

    def close(self) -> None: ...


class Held:
    """What one engine holds that is to end with it, at the latest. None of it may hold the engine or its model."""

    def __init__(self, engine: object, transfers: Transfers, arena: Arena, helpers: Sequence[Helpers]) -> None:
        self._parts = os.getpid(), transfers, arena, helpers
        self._collected = weakref.finalize(engine, _release_aside, *self._parts)
        self._collected.atexit = False  # the threads are daemons
        _living.add(engine)

    def release(self) -> None:
        """End the threads and give the slots back, now."""
        self._collected.detach()
        _release(*self._parts)


def collect_dropped() -> None:
    """Free what engines that are no longer referenced still hold: weights, and without a `close()` slots and threads.

    Model and engine refer to each other, and Python may collect such a cycle much later. Costs nothing where no
    engine lives, else some 0.1 s.
    """
    if _living:
        gc.collect()
    while _releasing:
        _releasing.pop().join()


def _release(process: int, transfers: Transfers, arena: Arena, helpers: Sequence[Helpers]) -> None:
    if process == os.getpid():  # a forked child has none of the threads
        for each in helpers:
            each.close()
        transfers.close()
    arena.close()


def _release_aside(*parts: Any) -> None:
    """The collecting thread, maybe one of the engine's own, cannot wait for them to end."""
    thread = threading.Thread(target=_release, args=parts, name="smoe-release", daemon=True)
    _releasing.append(thread)
    thread.start()
