"""A clock that moves when somebody sleeps, waits or looks at it."""

from __future__ import annotations

import threading
import time

import pytest

TICK = 1e-8
"""Every look takes time, else a thread that waits awake would wait for ever."""
NEAR = 1e-5
"""Seconds to which times are compared: some hundred looks."""


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", self.read)
        monkeypatch.setattr(time, "sleep", self.pass_by)
        monkeypatch.setattr(threading.Condition, "wait", lambda _, seconds: self.pass_by(seconds + TICK))

    def read(self) -> float:
        self.now += TICK
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
