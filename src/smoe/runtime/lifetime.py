"""Stops the threads of an engine and frees its memory, also if `close()` is never called.

Python never collects running threads, nor any object that they refer to. So an engine's threads do not refer to the
engine or its model: these can be collected, and their collection ends the threads.
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
    """An object that owns threads for computing or predicting. `close` ends them."""

    def close(self) -> None: ...


class Held:
    """The memory and threads that belong to one engine and end with it. They must not refer to the engine or its
    model."""

    def __init__(self, engine: object, transfers: Transfers, arena: Arena, helpers: Sequence[Helpers]) -> None:
        self._parts = os.getpid(), transfers, arena, helpers
        self._collected = weakref.finalize(engine, _release_aside, *self._parts)
        self._collected.atexit = False  # the threads are daemons
        _living.add(engine)

    def release(self) -> None:
        """Free the slots and end the threads at once."""
        self._collected.detach()
        _release(*self._parts)


def collect_dropped() -> None:
    """Free the memory and end the threads of engines that the program no longer uses.

    A model and its engine refer to each other, and Python may collect such a cycle much later. The call takes some 0.1
    s, and no time if no engine exists.
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
    """Release an engine's resources on a new thread. The collecting thread may be one of the engine's own, which cannot
    wait for its own end."""
    thread = threading.Thread(target=_release, args=parts, name="smoe-release", daemon=True)
    _releasing.append(thread)
    thread.start()
