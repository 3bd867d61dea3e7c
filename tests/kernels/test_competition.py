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

    def after(self, seconds: float, waited: float, is_prompt: bool = False) -> bool:
        self.seconds += seconds
        self.waited += waited
        return self.competition.is_there(is_prompt)


def test_for_prompts_it_is_there_while_the_thread_waits_and_for_two_seconds_afterwards() -> None:
    machine = Machine()
    assert not machine.after(0.0, 0.0, is_prompt=True)
    assert not machine.after(0.25, 0.02, is_prompt=True), "short jobs of others"
    assert machine.after(0.25, 0.06, is_prompt=True)
    for _ in range(3):
        assert machine.after(0.5, 0.0, is_prompt=True), "it may have been avoided"
    assert not machine.after(0.6, 0.0, is_prompt=True)


def test_for_tokens_it_is_there_after_a_second_and_for_five_seconds_afterwards() -> None:
    machine = Machine()
    assert [machine.after(0.25, 0.08) for _ in range(5)] == [False] * 4 + [True]
    assert machine.after(4.9, 0.0), "it may have been avoided"
    assert not machine.after(0.2, 0.0)


def test_bursts_count_for_prompts_alone() -> None:
    machine = Machine()
    for number in range(20):
        assert not machine.after(0.25, 0.02 if number % 4 == 3 else 0.1)
        assert machine.after(0.0, 0.0, is_prompt=True)


def test_a_short_time_is_not_judged() -> None:
    machine = Machine()
    assert not machine.after(0.1, 0.1, is_prompt=True)
    assert not machine.after(0.8, 0.0, is_prompt=True), "0.1 s of 0.9"


@pytest.mark.parametrize("is_prompt", [False, True])
def test_a_time_of_other_work_is_not_judged(is_prompt: bool) -> None:
    """Neither while a model is loaded by several threads, nor between two requests, after which it is judged again."""
    machine = Machine()
    assert not any(machine.after(10.0, 5.0, is_prompt) for _ in range(9))
    assert not machine.after(60.0, 0.0, is_prompt)
    assert [machine.after(0.25, 0.1, is_prompt) for _ in range(5)][-1]


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
