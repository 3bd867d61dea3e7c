"""Measures during the run whether prefetching makes steps faster: some steps with it, some without, then the faster
mode.

Prefetching costs arithmetic, bandwidth and processor time. Its benefit depends on the routing, the disk and the
machine's other work. No formula covers all of these, so time is measured.
"""

from __future__ import annotations

from math import comb
from statistics import median

TURN = 8
"""The number of steps in one mode before it changes. The first of them is not counted, because it still depends on the
mode before."""
TURNS = 4
"""The number of periods of `TURN` steps in a trial, alternating: on, off, on, off."""
STAY = 256
"""The number of steps between two trials."""
RECENT = 0.1
"""The weight of the last measurement in a decaying mean."""
MARGIN = 0.02
"""The fraction by which steps without prefetching must be faster to turn it off."""
WORTH = 0.4
"""The least fraction of prefetched experts that must be used. A wrong prefetch costs as much as a right one saves: it
may delay a load for which a layer waits, and wastes memory and processor time."""
ENOUGH = 48
"""The number of prefetches whose used fraction is compared with `WORTH` directly."""
RISK = 0.01
"""Fewer prefetches decide if so low a number of used ones has a smaller probability than this where a fraction of
`WORTH` is used on average. This holds for one test. With a test after every step, the probability of a wrong decision
before `ENOUGH` prefetches is 1 to 3 % for a fraction of `WORTH`, and below 0.3 % for a half."""


class Trial:
    """A comparison of steps with and without prefetching. `is_on` is the mode of the next step; `note` records its
    duration.

    The measured time decides. If most predictions are wrong, prefetching is turned off at once, until the next
    comparison. Ten prefetched experts of which none was used are enough for this.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.switches_off = 0
        """The number of trials after which prefetching was off."""
        self.trials = 0
        self._left = STAY
        self._turn = self._step = 0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._guesses = self._right = 0

    def note(self, seconds: float, guesses: int = 0, right: int = 0) -> None:
        """Record one step: its duration in seconds, and the total numbers of prefetches made (`guesses`) and used
        (`right`)."""
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
        """Leave all prefetches made so far out of the trial, because they belong to a prompt."""
        self._guesses, self._right = guesses, right

    def _are_wrong(self, guesses: int, right: int) -> bool:
        """Return whether most experts were prefetched in vain since the count began: after a prompt, after a decision
        by this method, or after `ENOUGH` prefetches. Return false if there were too few prefetches to decide."""
        made, proved = guesses - self._guesses, right - self._right
        if made < ENOUGH and _chance_of_at_most(proved, made) >= RISK:
            return False
        self.pass_over(guesses, right)
        return proved < WORTH * made

    def _begin(self) -> None:
        self.is_on, self._turn, self._step, self._left = True, 0, 0, STAY
        self._seconds = {True: [], False: []}

    def _conclude(self, is_on: bool) -> None:
        self.trials += 1
        self.is_on = is_on
        self.switches_off += not is_on


class LookAheadTrial:
    """A comparison of the seconds that a look-ahead takes with the seconds that a layer waits for its loads, both
    measured.

    A look-ahead that takes longer would delay the step. On a model of many small experts, a layer's attention takes as
    long as a load, because its kernels are launched one by one (docs/papers/smoe.md).
    """

    def __init__(self) -> None:
        self._wait: dict[int, float] = {}
        """The decaying mean of the seconds waited, by the number of loads."""
        self._cost: float | None = None

    def fits(self, loads: int) -> bool:
        """Return whether running a look-ahead takes less time than waiting for `loads` loads; true if nothing was
        measured yet."""
        wait = self._wait.get(loads)
        return loads > 0 and (wait is None or self._cost is None or wait >= self._cost)

    def note_wait(self, loads: int, seconds: float) -> None:
        """Record that `loads` loads ended `seconds` after the resident experts were computed."""
        self._wait[loads] = _mixed(self._wait.get(loads), seconds)

    def note_cost(self, seconds: float) -> None:
        """Record the seconds that a look-ahead took."""
        self._cost = _mixed(self._cost, seconds)


def _chance_of_at_most(used: int, made: int) -> float:
    """Return the probability that at most `used` of `made` prefetched experts are used, if each is used with
    probability `WORTH`."""
    return sum(comb(made, count) * WORTH**count * (1 - WORTH) ** (made - count) for count in range(used + 1))


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + RECENT * (now - before)
