"""Whether something pays, found out while it runs: short turns with and without it, then the faster way for a while.

Prefetching costs arithmetic, bandwidth and two cores' attention, and what it saves depends on the routing, the disk and
what else the machine does; no formula distinguishes these, a clock does.
"""

from __future__ import annotations

from statistics import median

TURN = 8
"""Steps of one turn; the first of each is not counted, as it still lives on what the turn before left."""
TURNS = 4
"""Turns of a trial, alternating: on, off, on, off."""
STAY = 256
"""Steps between two trials."""
RECENT = 0.1
"""Weight of the last measurement in a decaying mean."""
MARGIN = 0.02
"""Off must be faster by this share: a tie is left on."""
WORTH = 0.4
"""Share of guesses that must be right. A wrong one costs what a right one saves: it takes the disk from a load that is
waited for, by up to a chunk, and memory's and the processor's time for nothing."""
_LEAST_GUESSES = 48


class Trial:
    """`is_on` says how the next step is to run; `note` hears how long it took.

    The clock decides, but for guesses that are mostly wrong: then it is off at once, until the next trial.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.switches_off = 0
        """Trials that ended with it off."""
        self.trials = 0
        self._left = STAY
        self._turn = self._step = 0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._guesses = self._right = 0

    def note(self, seconds: float, guesses: int = 0, right: int = 0) -> None:
        """Record one step: its duration, and the running totals of prefetches made and used."""
        if self.is_on and self._are_wrong(guesses, right):
            self._turn = TURNS
            self._left = STAY
            self._conclude(False)
            return
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
                self._conclude(median(self._seconds[True]) <= median(self._seconds[False]) * (1 + MARGIN))

    def pass_over(self, guesses: int, right: int) -> None:
        """Leave all prefetches so far, those of a prompt, out of the trial."""
        self._guesses, self._right = guesses, right

    def _are_wrong(self, guesses: int, right: int) -> bool:
        """Of the guesses since the last look, if there are enough to tell."""
        made, proved = guesses - self._guesses, right - self._right
        if made < _LEAST_GUESSES:
            return False
        self._guesses, self._right = guesses, right
        return proved < WORTH * made

    def _begin(self) -> None:
        self.is_on, self._turn, self._step, self._left = True, 0, 0, STAY
        self._seconds = {True: [], False: []}

    def _conclude(self, is_on: bool) -> None:
        self.trials += 1
        self.is_on = is_on
        self.switches_off += not is_on


class LookAheadTrial:
    """Whether looking ahead fits into the time that a layer waits for its loads anyway; both as last measured.

    Outside that shadow it would delay what it is meant to speed up: on a fine-grained model a layer's attention,
    launched kernel by kernel, takes as long as a load (docs/papers/smoe.md).
    """

    def __init__(self) -> None:
        self._wait: dict[int, float] = {}
        """Seconds by the number of loads waited for, decaying means."""
        self._cost: float | None = None

    def fits(self, loads: int) -> bool:
        """Whether to look ahead while so many loads are waited for; yes where nothing is known yet."""
        wait = self._wait.get(loads)
        return loads > 0 and (wait is None or self._cost is None or wait >= self._cost)

    def note_wait(self, loads: int, seconds: float) -> None:
        """So many loads were waited for until so long after the resident experts were done."""
        self._wait[loads] = _mixed(self._wait.get(loads), seconds)

    def note_cost(self, seconds: float) -> None:
        """A look-ahead took so long."""
        self._cost = _mixed(self._cost, seconds)


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + RECENT * (now - before)
