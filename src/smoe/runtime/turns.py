"""Mutual exclusion on an engine: one thread at a time uses it, others wait, and any thread can end the running request.

    thread A   | turn: generate: pass, pass, pass ...              | done
    thread B        | waits ............. logs a warning .... | turn: ...
    thread C                  | cancel(): A's next layer raises

A `Cancellation` instead ends one call, whether it runs or waits.

No lock is held during a turn, only a note of its thread: a `finally` can then undo an interrupt (Ctrl-C) at any point,
which is not possible for a lock that was just being acquired.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from smoe.errors import EngineBusyError, GenerationCancelledError
from smoe.runtime.cancellation import Cancellation

PATIENCE_SECONDS = 2.0
"""A thread that waits longer than this logs a warning."""
_LOOK_AGAIN_SECONDS = 1.0
"""An interrupt can lose the notification that a turn has ended, so waiting threads check again after this time."""

_log = logging.getLogger(__name__)


class Turns:
    """The turns of one engine. A turn that a thread begins within its own turn is part of the first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._began = 0.0
        self._why_cancelled: str | None = None
        self._cancellations: Sequence[Cancellation] = ()
        """The cancellations of the running turn."""

    @property
    def is_running(self) -> bool:
        """Whether any thread has the turn."""
        return self._holder is not None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the turn."""
        return self._holder == threading.get_ident()

    @contextmanager
    def taken(
        self, timeout_seconds: float | None, bound: str, cancellations: Sequence[Cancellation] = ()
    ) -> Iterator[None]:
        """Give the calling thread the turn for the duration of the `with` block.

        Raises `EngineBusyError` after waiting `timeout_seconds` (None: for ever); `bound` is the user's name of that
        time. Raises `GenerationCancelledError` where one of `cancellations` ends the call before its turn.
        """
        if self.is_mine:
            yield
            return
        with ExitStack() as watched:
            for each in cancellations:
                watched.enter_context(each.waking(self._wake))
            try:
                try:
                    self._wait(timeout_seconds, bound, cancellations)
                    yield
                finally:
                    self._end()
            finally:
                self._end()  # again, in case an interrupt occurred within the first call

    def cancel(self, why: str) -> bool:
        """Make the running turn raise at its next layer; returns whether there was one. Any thread may call this."""
        with self._changed:
            if self._holder is None:
                return False
            self._why_cancelled = why
            return True

    def check(self) -> None:
        """Raise `GenerationCancelledError` where the running turn was cancelled."""
        if self._why_cancelled is not None:
            raise GenerationCancelledError(self._why_cancelled)
        _check(self._cancellations)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _end(self) -> None:
        if self.is_mine:
            self._holder = None
            with self._changed:
                self._changed.notify()

    def _wait(self, timeout_seconds: float | None, bound: str, cancellations: Sequence[Cancellation]) -> None:
        asked = time.monotonic()
        end = None if timeout_seconds is None else asked + timeout_seconds
        is_patient = True
        with self._changed:
            while self._holder is not None:
                _check(cancellations)
                now = time.monotonic()
                if end is not None and now >= end:
                    raise EngineBusyError(
                        f"another request has been running for {now - self._began:.1f} s, and this one was to wait "
                        f"{timeout_seconds:g} s at most ({bound}); try again later, end the other with "
                        "model.offload.cancel(), or wait longer"
                    )
                if is_patient and now - asked >= PATIENCE_SECONDS:
                    is_patient = False
                    _log.warning(
                        "waiting for this model: another request has been running for %.1f s; model.offload.cancel() "
                        "ends it, turn_timeout_seconds bounds the wait",
                        now - self._began,
                    )
                left = _LOOK_AGAIN_SECONDS if end is None else min(_LOOK_AGAIN_SECONDS, end - now)
                self._changed.wait(min(left, PATIENCE_SECONDS) if is_patient else left)
            self._began = time.monotonic()
            self._why_cancelled, self._cancellations = None, cancellations
            self._holder = threading.get_ident()


def _check(cancellations: Sequence[Cancellation]) -> None:
    if any(each.ends_without_tokens for each in cancellations):
        raise GenerationCancelledError("this request was cancelled by its Cancellation before its first token")
