"""What the coordinator believes of a worker. Would catch a deadline that never comes or comes at once, a worker that is
thought to hold more than it has room for, a time of many rows taken for that of few.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.cluster.frames import Times
from smoe.cluster.members import Member, WorkerState, deadline
from smoe.compute.unit import ExpertTask
from smoe.expert import EXACT, ExpertKey


def member(slots: int = 4) -> Member:
    return Member(2, "shelf", "key", b"", slots)


def key(expert: int) -> ExpertKey:
    return (0, expert, EXACT)


def test_it_takes_as_many_rows_of_an_expert_as_it_computes() -> None:
    found = member()
    found.state, found.most_rows = WorkerState.READY, 8
    few, many = ExpertTask(key(0), range(8)), ExpertTask(key(1), range(9))
    assert found.takes([few, few]) and not found.takes([few, many])
    found.state = WorkerState.OUT
    assert not found.takes([few])


@given(slots=st.integers(1, 5), asked=st.lists(st.lists(st.integers(0, 7), max_size=6, unique=True), max_size=20))
def test_it_holds_what_was_used_last(slots: int, asked: list[list[int]]) -> None:
    """Beside a plain ordered dict."""
    found, plain = member(slots), OrderedDict[ExpertKey, None]()
    for experts in asked:
        missing = 0
        for each in map(key, experts):
            missing += each not in plain
            plain[each] = None
            plain.move_to_end(each)
            if len(plain) > slots:
                plain.popitem(last=False)
        assert found.will_hold(map(key, experts)) == missing
        assert {each for each in map(key, range(8)) if each in found.view().holds} == set(plain)


def test_a_deadline_is_several_times_what_is_usual() -> None:
    found, wanted = member(), [ExpertTask(key(1), [0]), ExpertTask(key(2), [0])]
    assert found.expected(wanted, 0) > 1, "nothing is known yet"
    found.note(wanted, 0.50, Times(0.46, 0.06, 0.40, 2))
    assert found.expert == pytest.approx(0.03)
    assert found.load == pytest.approx(0.2)
    assert found.hop == pytest.approx(0.04)
    assert found.expected(wanted, 2) == pytest.approx(0.50)
    assert found.expected(wanted, 0) == pytest.approx(0.10)
    found.note(wanted, 0.001, Times(0.0005, 0.0004))
    assert found.expected(wanted, 0) < 0.09, "it learns"
    assert deadline(0.5) == pytest.approx(1.5)
    assert deadline(0.0) == 0.025, "it is never asked to be faster than a network"
    assert deadline(1e6) == 30.0


def test_what_waits_behind_another_request_is_no_distance() -> None:
    """Of a prompt four are under way at once: the first token after it must not wait for seconds for who is frozen."""
    found, wanted = member(), [ExpertTask(key(1), [0])]
    found.note(wanted, 0.012, Times(0.010, 0.010))
    for _ in range(20):
        found.note(wanted, 0.9, Times(0.010, 0.010), queued=True)
    assert found.hop == pytest.approx(0.002)


def test_many_rows_teach_the_time_of_a_row_alone() -> None:
    found = member()
    found.note([ExpertTask(key(1), [0])], 0.02, Times(0.01, 0.008))
    found.note([ExpertTask(key(1), range(100))], 0.5, Times(0.4, 0.3))
    assert found.expert == pytest.approx(0.008)
    assert found.row < 0.008
    assert found.expected([ExpertTask(key(1), range(1000))], 0) > found.expected([ExpertTask(key(1), [0])], 0)


def test_a_load_that_nobody_waited_for_takes_its_time_all_the_same() -> None:
    """Experts of a prompt are read while others are computed; the next token's is not."""
    found, wanted = member(), [ExpertTask(key(1), [0])]
    found.note(wanted, 0.31, Times(0.30, 0.30, loading=0.28, loads=1))
    assert found.load == pytest.approx(0.28)
    assert found.expected(wanted, 1) > 0.58
    found.note(wanted, 0.31, Times(0.30, 0.30))
    assert found.load == pytest.approx(0.28), "nothing was read: it had been told ahead"


def test_what_it_was_told_to_have_stays() -> None:
    found = member(slots=2)
    assert found.will_use([key(1), key(2)]) == 2
    assert found.will_bring([key(1), key(3)]) == [key(3)], "in the place of 2, though 1 was used before it"
    assert set(found.view().holds) == {key(1), key(3)}
    assert found.take_coming([key(1)]) == 1, "3 may be under way"
    assert found.will_use([key(4)]) == 1
    assert set(found.view().holds) == {key(3), key(4)}, "1 has been used"
    assert found.take_coming([key(3)]) == 1 and found.take_coming([key(3)]) == 0


def test_what_it_brings_in_is_counted_whatever_for() -> None:
    found = member(slots=2)
    found.will_use([key(1), key(2)])
    found.will_bring([key(1), key(3)])
    found.will_use([key(1), key(3)])
    assert (found.uses, found.brought) == (4, 3)
    for _ in range(600):
        found.will_use([key(1)])
    assert found.uses <= 513 and found.brought < 3, "what was long ago counts less"


def test_what_is_read_ahead_is_in_the_way_once() -> None:
    """A worker reads what it is asked for beside what it was told of: else a frozen one is waited for for seconds."""
    found = member(slots=8)
    assert found.will_bring([key(expert) for expert in range(6)]) == [key(expert) for expert in range(6)]
    assert found.will_hold([key(0), key(1)]) == 0
    assert found.take_coming([key(0), key(1)]) == 3, "both may be on their way, and another one before them"
    assert found.take_coming([key(7)]) == 1
    assert found.take_coming(map(key, range(6))) == 4
    assert found.take_coming([key(0)]) == 0


def test_proofs_are_no_work() -> None:
    found, wanted = member(), [ExpertTask(key(1), [0])]
    found.will_use([key(1)])
    found.note(wanted, 0.02, Times(0.01, 0.008))
    found.is_proven()
    assert (found.experts, found.uses, found.brought) == (0, 0, 0)
    assert found.expert > 0 and key(1) in found.view().holds, "what it takes, and what it holds, is known"
