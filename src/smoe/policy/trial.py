"""Measures whether prefetching pays, during the run: short turns with and without it, then the faster way for a while.

Prefetching costs arithmetic, bandwidth and processor time. Its benefit depends on the routing, the disk and the
machine's other work; no formula covers all of these, but a clock does.
"""

from __future__ import annotations

from statistics import median

TURN = 8
"""The steps of one turn. The first is not counted, because it still depends on the turn before."""
TURNS = 4
"""The turns of a trial, alternating: on, off, on, off."""
STAY = 256
"""The steps between two trials."""
RECENT = 0.1
"""The weight of the last measurement in a decaying mean."""
MARGIN = 0.02
"""The share by which "off" must be faster; a tie leaves it on."""
WORTH = 0.4
"""The least share of predictions that must be right. A wrong one costs what a right one saves: it delays a load that is
waited for by up to a chunk, and wastes memory and processor time."""
_LEAST_GUESSES = 48


class Trial:
    """A comparison of steps with and without prefetching: `is_on` is the mode of the next step, `note` records its
    duration.

    The clock decides, except for predictions that are mostly wrong: they switch prefetching off until the next trial.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.switches_off = 0
        """The number of trials that ended with "off"."""
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
        """Exclude all prefetches so far, those of a prompt, from the trial."""
        self._guesses, self._right = guesses, right

    def _are_wrong(self, guesses: int, right: int) -> bool:
        """Return whether the predictions since the last check are mostly wrong, if there are enough."""
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
    """A comparison of the time of a look-ahead with the time that a layer waits for its loads, both measured.

    A longer look-ahead would delay the step: on a fine-grained model a layer's attention, launched kernel by kernel,
    takes as long as a load (docs/papers/smoe.md).
    """

    def __init__(self) -> None:
        self._wait: dict[int, float] = {}
        """Decaying means of the seconds waited, by the number of loads."""
        self._cost: float | None = None

    def fits(self, loads: int) -> bool:
        """Return whether a look-ahead fits while `loads` loads are waited for; true where nothing is measured yet."""
        wait = self._wait.get(loads)
        return loads > 0 and (wait is None or self._cost is None or wait >= self._cost)

    def note_wait(self, loads: int, seconds: float) -> None:
        """Record that `loads` loads were waited for until `seconds` after the resident experts were done."""
        self._wait[loads] = _mixed(self._wait.get(loads), seconds)

    def note_cost(self, seconds: float) -> None:
        """Record the duration of a look-ahead."""
        self._cost = _mixed(self._cost, seconds)


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + RECENT * (now - before)
