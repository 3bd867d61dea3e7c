"""The time of a device: real time, or slowed down for an emulated device (`emulation.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Clock = Callable[[], float]
"""A function that returns the reported time in seconds."""


class Pacing:
    """Real time: the methods do nothing, because work ends when it ends.

    Where another device `has_times_of_its_own`, code that computes reports what it has done and when that began (on the
    real clock). An emulation then waits until the work would have ended on the emulated device (`runtime/paced.py`).
    """

    is_emulated = False
    has_times_of_its_own = False
    """Whether work ends later than on this machine."""
    is_paced = True
    """False while the real machine is measured for an emulation."""
    dilation = 1.0
    """The real seconds per reported second."""
    late_seconds = 0.0
    """The total reported time by which work ended too late."""

    @property
    def now(self) -> Clock:
        """The function that returns the reported time in seconds."""
        return time.perf_counter

    def begin_pass(self) -> None:
        """Note the beginning of a forward pass."""

    def reach_experts(self, tokens: int) -> None:
        """Note that the device has computed a layer up to its experts: attention, router and so on."""

    def leave_experts(self) -> None:
        """Note that a layer's experts are done, so that the next layer begins."""

    def compute_experts(self, began: float, rows: list[int]) -> None:
        """Note that the device has computed one expert for each entry of `rows`, for that number of tokens."""

    def look_ahead(self, began: float, tokens: int) -> None:
        """Note that the device has run another layer's attention and router."""

    def ask_gate(self, began: float) -> None:
        """Note that the device has run another layer's router."""

    def begin_planning(self) -> float:
        """Note that Python code for decisions begins; return the argument for `end_planning`."""
        return 0.0

    def end_planning(self, began: float) -> None:
        """Note that the decision has ended."""

    def computing_on_host(self, rows: int) -> AbstractContextManager[object]:
        """Return a context for the CPU's computing of one expert for `rows` tokens."""
        return nullcontext()
