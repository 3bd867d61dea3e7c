"""The description of a simulated cluster: its network, the times of a worker, and the tokens to decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Wire:
    """The coordinator's network port, and its connections to the workers."""

    bytes_per_second: float
    delay: float = 0.0
    """Seconds that a message travels, in one direction."""
    message: float = 0.0
    """Seconds for which every message occupies the port, in addition to the seconds for its bytes."""

    def seconds(self, nbytes: float) -> float:
        return self.message + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class WorkerTimes:
    """The times of a worker in seconds, and its number of slots."""

    load: float
    """Seconds to load one expert into a slot."""
    expert: float
    """Seconds to compute one expert for one row (token)."""
    slots: int = 1
    away: float = 0.0
    """Seconds that a message to the worker takes in one direction, in addition to `Wire.delay`."""
    chunk: float | None = None
    """Seconds to read one chunk of an expert. A load that is no longer needed stops after the current chunk. None: such
    a load is completed."""


class DecodedToken(NamedTuple):
    """One token of a recorded run: the experts that its routers chose, and the experts that were predicted."""

    chosen: Sequence[Sequence[int]]
    """[L][K] the experts chosen in each layer."""
    named: Sequence[Sequence[int]] | None = None
    """For each layer, the predicted experts: [L][K, or more with extra predictions]. None: there are no predictions."""
    own_is_right: bool = True
    """Whether the draft model, decoding from its own previous token, arrives at the token that the model decodes."""
    astray: Sequence[Sequence[int]] | None = None
    """The experts that the draft model predicts if its own token is a different one."""
