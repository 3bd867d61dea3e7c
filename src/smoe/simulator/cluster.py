"""What describes a simulated cluster: its network, the times of a worker, and the tokens that it decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Wire:
    """A port, and the way from there."""

    bytes_per_second: float
    delay: float = 0.0
    """One way, seconds."""
    message: float = 0.0
    """Seconds for which every message holds the port, in addition to its bytes."""

    def seconds(self, nbytes: float) -> float:
        return self.message + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class WorkerTimes:
    """Seconds."""

    load: float
    """Seconds to load one expert into a slot."""
    expert: float
    """Seconds to compute one for a row."""
    slots: int = 1
    away: float = 0.0
    """One way, without the wire's own delay."""
    chunk: float | None = None
    """Seconds of a chunk: a wrong load stops after the chunk in flight; None: it is loaded to its end."""


class DecodedToken(NamedTuple):
    """The experts that the routers chose for one token, and those that were predicted."""

    chosen: Sequence[Sequence[int]]
    """[L][K]"""
    named: Sequence[Sequence[int]] | None = None
    """Predicted experts, [L][K, or more with spares]; None: no predictions."""
    own_is_right: bool = True
    """Whether the draft model's own token equals this one."""
    astray: Sequence[Sequence[int]] | None = None
    """The experts that the draft model predicts where its token differs."""
