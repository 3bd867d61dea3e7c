"""Other programs on the same cores. Would catch: an answer that flips while threads avoid the other program, and one
that many short waits make true.
"""

from __future__ import annotations

import pytest

from smoe.kernels import competition
from smoe.kernels.competition import Competition, waited_seconds


class Machine:
    """A clock, and the time that the thread has waited, which the test sets."""

    def __init__(self) -> None:
        self.seconds, self.waited = 100.0, 7.0
        self.competition = Competition(lambda: self.waited, lambda: self.seconds)

    def after(self, seconds: float, waited: float) -> bool:
        self.seconds += seconds
        self.waited += waited
        return self.competition.is_there()


def test_it_is_there_while_the_thread_waits_and_for_two_seconds_afterwards() -> None:
    machine = Machine()
    assert not machine.after(0.0, 0.0)
    assert not machine.after(0.2, 0.016), "short jobs of others"
    assert machine.after(0.2, 0.1), "half of a core"
    for _ in range(3):
        assert machine.after(0.5, 0.0), "it may have been avoided"
    assert not machine.after(0.6, 0.0)


def test_a_short_time_is_not_judged() -> None:
    machine = Machine()
    assert not machine.after(0.01, 0.01)
    assert not machine.after(0.2, 0.0), "0.01 s of 0.21"


@pytest.mark.parametrize("content", [None, b"", b"1 2", b"no numbers here"], ids=["no file", "empty", "two", "words"])
def test_a_system_that_does_not_measure_it(content: bytes | None, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "schedstat"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(competition, "_WAITS", path)
    assert waited_seconds() == (2e-9 if content == b"1 2" else 0.0)


def test_the_system_measures_or_says_zero() -> None:
    before = waited_seconds()
    assert before >= 0 and waited_seconds() >= before
