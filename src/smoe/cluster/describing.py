"""Makes the description of the coordinator's experts that workers without torch need. The first request of a worker
starts a thread that makes the description. Until the description is complete, workers repeat their requests."""

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
    """The description of the experts that the coordinator sends to a worker without torch, and the limits within which
    that worker's results equal the coordinator's."""

    description: Description
    arithmetic: str
    """One of `KERNELS`: the kernels with which the worker's results equal the coordinator's bit by bit."""
    most_rows: int
    """The largest number of rows of one expert for which the worker's results equal the coordinator's."""


class Describer:
    """Makes the description of the experts, once. Only the thread of the connections may call it."""

    def __init__(self, describe: Callable[[], LightWorker]) -> None:
        """`describe` raises `SmoeError` where workers without torch cannot compute these experts with equal bits."""
        self._describe = describe
        self._thread: threading.Thread | None = None
        self.found: LightWorker | None = None
        """The description; None if it is not complete yet, or impossible."""
        self.why = ""
        """The reason why a description is impossible; else empty."""
        self._parts: list[Any] = []

    def begin(self) -> None:
        """Start to make the description, unless it has been started."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="smoe-describe", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait until the thread that makes the description has ended. Repeated calls have no effect."""
        if self._thread is not None:
            self._thread.join()

    @property
    def parts(self) -> list[Any]:
        """The message parts of the EXPERTS message that contains the description; empty unless `found`."""
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
