"""The description of a simulated cluster: its network, a worker's times, and the decoded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Wire:
    """A network port and its connections."""

    bytes_per_second: float
    delay: float = 0.0
    """The delay one way, in seconds."""
    message: float = 0.0
    """Seconds for which every message occupies the port, in addition to its bytes."""

    def seconds(self, nbytes: float) -> float:
        return self.message + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class WorkerTimes:
    """A worker's times in seconds, and its slots."""

    load: float
    """Seconds to load one expert into a slot."""
    expert: float
    """Seconds to compute one expert for a row."""
    slots: int = 1
    away: float = 0.0
    """Seconds one way, without the wire's own delay."""
    chunk: float | None = None
    """Seconds to read a chunk: a load that is not needed stops after the current chunk; None: it is completed."""


class DecodedToken(NamedTuple):
    """The experts that the routers chose for one token, and the predicted ones."""

    chosen: Sequence[Sequence[int]]
    """[L][K] the chosen experts."""
    named: Sequence[Sequence[int]] | None = None
    """[L][K, or more with extra predictions] the predicted experts; None: no predictions."""
    own_is_right: bool = True
    """Whether the draft model's own token equals this one."""
    astray: Sequence[Sequence[int]] | None = None
    """The experts that the draft model predicts where its token differs."""
