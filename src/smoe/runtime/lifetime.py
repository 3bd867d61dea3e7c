"""Stops an engine's threads and frees its memory, also without `close()`.

Running threads are never garbage-collected, nor the objects that they refer to. So they refer to no engine and no
model, and the collection of an engine without `close()` ends them.
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
"""Threads that release collected engines without `close()`."""


class Helpers(Protocol):
    """Threads that compute."""

    def close(self) -> None: ...


class Held:
    """The resources of one engine that end with it. They must not refer to the engine or its model."""

    def __init__(self, engine: object, transfers: Transfers, arena: Arena, helpers: Sequence[Helpers]) -> None:
        self._parts = os.getpid(), transfers, arena, helpers
        self._collected = weakref.finalize(engine, _release_aside, *self._parts)
        self._collected.atexit = False  # the threads are daemons
        _living.add(engine)

    def release(self) -> None:
        """End the threads and free the slots now."""
        self._collected.detach()
        _release(*self._parts)


def collect_dropped() -> None:
    """Free the resources of engines without references: weights and, without `close()`, slots and threads.

    Model and engine refer to each other, and Python may collect such a cycle much later. This costs nothing where no
    engine exists, else some 0.1 s.
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
    """Release on a new thread: the collecting thread may be one of the engine's own, which cannot wait for itself."""
    thread = threading.Thread(target=_release, args=parts, name="smoe-release", daemon=True)
    _releasing.append(thread)
    thread.start()
