"""Main says to workers without torch what its experts are. It finds that out when the first of them asks, on a thread
of its own, which no thread waits for: until then they ask again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from smoe.cluster import described
from smoe.cluster.described import Description
from smoe.errors import SmoeError

_log = logging.getLogger(__name__)


class LightWorker(NamedTuple):
    """The description that a worker without torch gets, and the limits of its work."""

    description: Description
    arithmetic: str
    """One of `KERNELS`, by which it computes with main's bits, ..."""
    most_rows: int
    """... for so many rows of one expert."""


class Describer:
    """Called by the link's thread."""

    def __init__(self, describe: Callable[[], LightWorker]) -> None:
        """`describe` raises `SmoeError` where workers without torch cannot compute these experts as main does."""
        self._describe = describe
        self._thread: threading.Thread | None = None
        self.found: LightWorker | None = None
        """None: it is not known yet, or cannot be."""
        self.why = ""
        """Why it cannot be."""
        self._parts: list[Any] = []

    def begin(self) -> None:
        """Measure it, unless it is known."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="smoe-describe", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for what is under way. Idempotent."""
        if self._thread is not None:
            self._thread.join()

    @property
    def parts(self) -> list[Any]:
        """The message; to be asked for where it was `found`."""
        if not self._parts and self.found is not None:
            self._parts = described.experts(self.found.description)
        return self._parts

    def _run(self) -> None:
        try:
            self.found = self._describe()
        except SmoeError as error:
            self.why = str(error)
        except Exception as error:  # the worker must not wait for ever
            _log.exception("the experts could not be described for workers without torch")
            self.why = f"{type(error).__name__}: {error}"
