"""How time passes on the computing device: in real time, or slowed down for an emulated device (`emulation.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Clock = Callable[[], float]
"""A function that returns the reported time in seconds."""


class Pacing:
    """The interface by which the engine reports its work to an emulated device. In real time, the methods of this class
    do nothing; an emulation overrides them.

    If a device `has_times_of_its_own`, code that computes reports through these methods what it has computed, and when
    the work began on the real clock. An emulation then waits until the work would have ended on the emulated device
    (`runtime/paced.py`).
    """

    is_emulated = False
    has_times_of_its_own = False
    """Whether work ends later than on this machine."""
    is_paced = True
    """False while the real machine is measured for an emulation."""
    dilation = 1.0
    """The number of real seconds per reported second."""
    late_seconds = 0.0
    """The sum of the times, in reported seconds, by which work ended too late."""

    @property
    def now(self) -> Clock:
        """A function that returns the time on the reported clock, in seconds."""
        return time.perf_counter

    def reset(self) -> None:
        """Set `late_seconds` to 0."""

    def begin_pass(self) -> None:
        """Report that a forward pass begins."""

    def reach_experts(self, tokens: int) -> None:
        """Report that the device has computed a layer up to its experts (attention, router and so on) for `tokens`
        tokens."""

    def leave_experts(self) -> None:
        """Report that the device has computed a layer's experts, so that the next layer begins."""

    def compute_experts(self, began: float, rows: list[int]) -> None:
        """Report that the device has computed several experts. `rows` has one entry for each expert: its number of
        tokens."""

    def look_ahead(self, began: float, tokens: int) -> None:
        """Report that the device has run the attention and router of another layer, which predicts experts."""

    def ask_gate(self, began: float) -> None:
        """Report that the device has run the router of another layer, which predicts experts."""

    def begin_planning(self) -> float:
        """Report that a decision in Python begins. Return the argument for `end_planning`."""
        return 0.0

    def end_planning(self, began: float) -> None:
        """Report that a decision in Python has ended; `began` is the result of `begin_planning`."""

    def computing_on_host(self, rows: int) -> AbstractContextManager[object]:
        """Return a context for the time in which the CPU computes one expert for `rows` tokens."""
        return nullcontext()
