"""A worker as it really is, by hand.

Would catch: two loads at once from one disk, what is asked for behind all that was told ahead, an expert forgotten
between its load and its computing, or before it was asked for while there was another to forget.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from smoe.expert import EXACT, ExpertKey
from smoe.simulator.cluster_machine import SimulatedMachine, SimulatedRequest, WorkerTimes
from smoe.simulator.events import Events

LOAD, EXPERT = 4.0, 0.5


class Bench:
    """A machine, and what becomes of what it is told and asked at given times."""

    def __init__(self, slots: int) -> None:
        self.events = Events()
        self.machine = SimulatedMachine(self.events, WorkerTimes(LOAD, EXPERT, slots))
        self.answers: dict[str, float] = {}
        self.loads: dict[str, int] = {}

    def announce(self, when: float, *experts: int) -> None:
        self.events.at(when, partial(self.machine.announce, keys(experts)))

    def ask(self, when: float, name: str, *experts: int) -> None:
        self.events.at(when, partial(self.machine.ask, keys(experts), partial(self._answered, name)))

    def _answered(self, name: str, request: SimulatedRequest) -> None:
        self.answers[name], self.loads[name] = self.events.now, request.loads


def keys(experts: Sequence[int]) -> list[ExpertKey]:
    return [(0, expert, EXACT) for expert in experts]


def test_one_is_computed_while_the_next_is_read() -> None:
    bench = Bench(slots=2)
    bench.ask(0.0, "both", 1, 2)
    bench.events.run()
    assert bench.answers == {"both": 2 * LOAD + EXPERT} and bench.loads == {"both": 2}


def test_what_is_here_is_computed_first() -> None:
    bench = Bench(slots=2)
    bench.machine.begin_with(keys([2]))
    bench.ask(0.0, "both", 1, 2)
    bench.ask(0.0, "again", 2)
    bench.events.run()
    assert bench.answers == {"both": LOAD + EXPERT, "again": LOAD + 2 * EXPERT}, "one computing thread, in order"


def test_what_main_waits_for_shares_the_disk_with_what_was_told_ahead() -> None:
    """Two were told of: the first is under way, the asked one comes next, then the second."""
    bench = Bench(slots=4)
    bench.announce(0.0, 1, 2)
    bench.ask(1.0, "other", 3)
    bench.events.run()
    assert bench.answers == {"other": 2 * LOAD + EXPERT} and bench.machine.loads == [0.0, LOAD, 2 * LOAD]


def test_what_was_told_ahead_is_no_load_when_it_is_asked_for() -> None:
    bench = Bench(slots=2)
    bench.announce(0.0, 1)
    bench.ask(1.0, "early", 1)
    bench.ask(9.0, "later", 1)
    bench.events.run()
    assert bench.answers == {"early": LOAD + EXPERT, "later": 9.0 + EXPERT} and bench.loads == {"early": 0, "later": 0}


def test_what_is_expected_is_forgotten_last() -> None:
    """Two slots: 1 is older, but will be asked for, so 3 takes the place of 2."""
    bench = Bench(slots=2)
    bench.machine.begin_with(keys([1, 2]))
    bench.announce(0.0, 1)
    bench.ask(1.0, "third", 3)
    bench.ask(10.0, "first", 1)
    bench.ask(20.0, "second", 2)
    bench.events.run()
    assert bench.loads == {"third": 1, "first": 0, "second": 1}


def test_what_it_is_told_anew_takes_the_place_of_what_it_was_told() -> None:
    """1 is under way; 2 has not begun, and is not brought in any more until it is asked for."""
    bench = Bench(slots=4)
    bench.announce(0.0, 1, 2)
    bench.announce(1.0, 3)
    bench.ask(20.0, "second", 2)
    bench.events.run()
    assert bench.machine.loads == [0.0, LOAD, 20.0] and bench.loads == {"second": 1}


def test_with_one_slot_reading_and_computing_take_turns() -> None:
    bench = Bench(slots=1)
    bench.ask(0.0, "both", 1, 2)
    bench.events.run()
    assert bench.answers == {"both": 2 * (LOAD + EXPERT)}


def test_what_has_to_be_loaded_here_takes_as_long_as_is_left() -> None:
    bench = Bench(slots=4)
    bench.ask(0.0, "three", 1, 2, 3)
    bench.events.at(LOAD / 2, lambda: bench.answers.update(left=bench.machine.under_way))
    bench.events.run()
    assert bench.answers["left"] == 2.5
