"""The course of time on a device: as it comes, unless a test bench slows it down (`emulation.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Clock = Callable[[], float]
"""Seconds, as reported."""


class Pacing:
    """Real time: work ends when it ends, and nothing here does anything.

    Everything that computes tells what it has done and when that began (on the real clock); a test bench then waits
    until it would have ended there.
    """

    is_emulated = False
    is_paced = True
    """False while the real machine is being measured for a test bench."""
    dilation = 1.0
    """Real seconds of a reported one."""
    late_seconds = 0.0
    """Reported time by which work ended later than it should have."""

    def now(self) -> float:
        """Seconds of reported time."""
        return time.perf_counter()

    def begin_pass(self) -> None:
        """A forward pass begins."""

    def reach_experts(self, tokens: int) -> None:
        """The device has come to a layer's experts: attention, router and the like are done."""

    def leave_experts(self) -> None:
        """A layer's experts are done; what follows is the next layer's."""

    def compute_experts(self, began: float, rows: list[int]) -> None:
        """The device has computed one expert for each entry, for so many tokens."""

    def look_ahead(self, began: float, tokens: int) -> None:
        """The device has run another layer's attention and router."""

    def ask_gate(self, began: float) -> None:
        """The device has run another layer's router."""

    def begin_planning(self) -> float:
        """Our own Python begins to decide or to keep books; what `end_planning` wants to know."""
        return 0.0

    def end_planning(self, began: float) -> None:
        """It has."""

    def computing_on_host(self, rows: int) -> AbstractContextManager[object]:
        """Around the CPU's computing of one expert for so many tokens."""
        return nullcontext()
