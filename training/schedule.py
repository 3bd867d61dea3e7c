"""Learning-rate schedule: warm up, hold, then decay linearly to zero (WSD), by steps or by the clock.

By the clock the run ends at a deadline whatever the speed of the machine, also when the process is paused for a
while: the decay is a function of the time that remains, never of the steps done.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Multiplier of the learning rates and the end of the run."""

    warmup_steps: int = 60
    decay_share: float = 0.3
    """Share of the run, at its end, in which the rate falls to zero."""
    total_steps: int | None = None
    """Length of the run in steps; used when there is no deadline."""
    start_seconds: float | None = None
    """Clock time of the start, seconds since the epoch."""
    deadline_seconds: float | None = None
    """Clock time of the end, seconds since the epoch."""

    def __post_init__(self) -> None:
        if (self.total_steps is None) == (self.deadline_seconds is None):
            raise ValueError("give either a number of steps or a deadline")
        if self.deadline_seconds is not None and self.start_seconds is None:
            raise ValueError("a deadline needs the time of the start too")

    def progress(self, step: int, now_seconds: float) -> float:
        """Share of the run that is over."""
        if self.total_steps is not None:
            return step / self.total_steps
        assert self.deadline_seconds is not None and self.start_seconds is not None
        return (now_seconds - self.start_seconds) / (self.deadline_seconds - self.start_seconds)

    def scale(self, step: int, now_seconds: float) -> float:
        """Multiplier of the learning rates for this step, 0 to 1."""
        left = max(0.0, 1.0 - self.progress(step, now_seconds))
        return min(1.0, (step + 1) / self.warmup_steps, left / self.decay_share)

    def finished(self, step: int, now_seconds: float) -> bool:
        """Whether the run is over."""
        return self.progress(step, now_seconds) >= 1.0


def parse_deadline(text: str, now_seconds: float) -> float:
    """Seconds since the epoch for `HH:MM` (the next such UTC time) or a number of minutes from now."""
    if match := re.fullmatch(r"(\d{1,2}):(\d{2})", text):
        day = now_seconds - now_seconds % 86_400
        clock = day + int(match[1]) * 3600 + int(match[2]) * 60
        return clock if clock > now_seconds else clock + 86_400
    try:
        return now_seconds + 60 * float(text)
    except ValueError:
        raise ValueError(f"deadline {text!r} is neither HH:MM (UTC) nor a number of minutes") from None


def utc_text(seconds: float) -> str:
    """A clock time as `YYYY-MM-DD HH:MM:SS` UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
