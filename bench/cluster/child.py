"""A process of the benchmark's own, forked: it says things, and dies with its parent.

Forked because imports take seconds of a core, and a worker that is killed is to come back within one. The parent has
imported everything, and has no threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_FORK = get_context("fork")


class ChildError(RuntimeError):
    """It has ended, or said nothing, where something was to be heard."""


class Child:
    """One process."""

    def __init__(self, name: str, work: Callable[[Child], None], log: Path | None = None) -> None:
        """It calls `work`; what it prints goes to the end of `log` (None: to where the parent's goes)."""
        self._log = log
        self._parent = os.getpid()
        self._mine, self._its = _FORK.Pipe()
        self._process = _FORK.Process(target=self._begin, args=(work,), name=name, daemon=True)
        self._process.start()
        self._its.close()

    def __repr__(self) -> str:
        return self._process.name

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def say(self, what: Any) -> None:
        """From either side."""
        (self._mine if os.getpid() == self._parent else self._its).send(what)

    def hear(self, seconds: float) -> Any:
        """What the other side says; raises `ChildError` where it does not within so many seconds."""
        end = self._mine if os.getpid() == self._parent else self._its
        try:
            if end.poll(seconds):
                return end.recv()
        except (EOFError, ConnectionResetError):
            pass
        raise ChildError(f"{self} has said nothing{f': {self.last_words()}' if self._log is not None else ''}")

    def last_words(self) -> str:
        """The end of what it has printed."""
        text = "" if self._log is None or not self._log.exists() else self._log.read_text(errors="replace")
        return text[-2000:]

    def signal(self, number: int) -> None:
        """Send a signal; nothing where it has ended."""
        if self.is_alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, whatever it does. Idempotent."""
        if self.is_alive:
            self._process.kill()
        self._process.join()

    def peak_rss_bytes(self) -> int:
        """The most memory that it has held, what it shares with its parent included; 0 where it has ended."""
        return _status(self.pid, "VmHWM")

    def rss_bytes(self) -> int:
        """What it holds now."""
        return _status(self.pid, "VmRSS")

    def _begin(self, work: Callable[[Child], None]) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._mine.close()
        if self._log is not None:
            with self._log.open("a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
        try:
            work(self)
        except Exception:
            traceback.print_exc()
            sys.exit(1)


def _status(pid: int, what: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(what)), 0)
