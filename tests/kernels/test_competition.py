"""Other programs on the same cores. Would catch an answer that flips while threads avoid the other program, and one
that an occasional lost core makes true.
"""

from __future__ import annotations

from smoe.kernels.competition import Competition, preemptions


class Machine:
    """A clock, and a count of lost cores, that the test sets."""

    def __init__(self) -> None:
        self.seconds, self.lost = 100.0, 7

    def after(self, seconds: float, lost: int) -> None:
        self.seconds += seconds
        self.lost += lost


def test_it_is_there_while_cores_are_lost_and_for_two_seconds_afterwards() -> None:
    machine = Machine()
    competition = Competition(lambda: machine.lost, lambda: machine.seconds)
    assert not competition.is_there()
    machine.after(0.2, lost=1)
    assert not competition.is_there(), "5 times a second"
    machine.after(0.2, lost=12)
    assert competition.is_there(), "60 times a second"
    for _ in range(3):
        machine.after(0.5, lost=0)
        assert competition.is_there(), "it may have been avoided"
    machine.after(0.6, lost=0)
    assert not competition.is_there()


def test_a_short_time_is_not_judged() -> None:
    machine = Machine()
    competition = Competition(lambda: machine.lost, lambda: machine.seconds)
    machine.after(0.01, lost=3)
    assert not competition.is_there()
    machine.after(0.2, lost=0)
    assert not competition.is_there(), "3 in 0.21 s"


def test_the_system_counts_or_says_zero() -> None:
    before = preemptions()
    assert before >= 0 and preemptions() >= before
