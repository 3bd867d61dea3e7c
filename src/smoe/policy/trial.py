"""Whether something pays, found out while it runs: short turns with and without it, then the faster way for a while.

Prefetching costs arithmetic, bandwidth and two cores' attention, and what it saves depends on the routing, the disk and
what else the machine does; no formula has told these apart, a clock does.
"""

from __future__ import annotations

from statistics import median

TURN = 8
"""Steps of one turn; the first of each is not counted, as it still lives on what the turn before left."""
TURNS = 4
"""Turns of a trial, alternating: on, off, on, off."""
STAY = 256
"""Steps between two trials."""
MARGIN = 0.02
"""Off must be faster by this share: a tie is left on."""


class Trial:
    """`is_on` says how the next step is to run; `note` hears how long it took."""

    def __init__(self) -> None:
        self.is_on = True
        self.switches_off = 0
        """Trials that ended with it off."""
        self.trials = 0
        self._left = STAY
        self._turn = self._step = 0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def note(self, seconds: float) -> None:
        """A step of the present way took so long."""
        if self._turn == TURNS:
            self._left -= 1
            if self._left == 0:
                self._begin()
            return
        self._step += 1
        if self._step > 1:
            self._seconds[self.is_on].append(seconds)
        if self._step == TURN:
            self._step = 0
            self._turn += 1
            self.is_on = not self.is_on
            if self._turn == TURNS:
                self._decide()

    def _begin(self) -> None:
        self.is_on, self._turn, self._step, self._left = True, 0, 0, STAY
        self._seconds = {True: [], False: []}

    def _decide(self) -> None:
        self.trials += 1
        self.is_on = median(self._seconds[True]) <= median(self._seconds[False]) * (1 + MARGIN)
        self.switches_off += not self.is_on
