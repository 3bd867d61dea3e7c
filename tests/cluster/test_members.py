"""What main believes of a worker. Would catch a deadline that never comes or comes at once, a worker that is thought to
hold more than it has room for, a time of many rows taken for that of few.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.cluster.frames import Times
from smoe.cluster.members import Member
from smoe.compute.unit import Wanted
from smoe.expert import EXACT, ExpertKey


def member(slots: int = 4) -> Member:
    return Member(2, "shelf", "key", b"", slots)


def key(expert: int) -> ExpertKey:
    return (0, expert, EXACT)


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
    found, wanted = member(), [Wanted(key(1), [0]), Wanted(key(2), [0])]
    assert found.deadline(wanted, 0) > 1, "nothing is known yet"
    found.note(wanted, 0.50, Times(0.46, 0.06, 0.40, 2))
    assert found.expert == pytest.approx(0.03)
    assert found.load == pytest.approx(0.2)
    assert found.hop == pytest.approx(0.04)
    assert found.deadline(wanted, 2) == pytest.approx(4 * 0.50)
    assert found.deadline(wanted, 0) == pytest.approx(4 * 0.10)
    found.note(wanted, 0.001, Times(0.0005, 0.0004))
    assert 0.05 <= found.deadline(wanted, 0) < 0.4, "it learns, and is never asked to be faster than a network"


def test_many_rows_teach_the_time_of_a_row_alone() -> None:
    found = member()
    found.note([Wanted(key(1), [0])], 0.02, Times(0.01, 0.008))
    found.note([Wanted(key(1), range(100))], 0.5, Times(0.4, 0.3))
    assert found.expert == pytest.approx(0.008)
    assert found.row < 0.008
    assert found.deadline([Wanted(key(1), range(1000))], 0) > found.deadline([Wanted(key(1), [0])], 0)


def test_a_load_that_nobody_waited_for_takes_its_time_all_the_same() -> None:
    """Experts of a prompt are read while others are computed; the next token's is not."""
    found, wanted = member(), [Wanted(key(1), [0])]
    found.note(wanted, 0.31, Times(0.30, 0.30, loading=0.28, loads=1))
    assert found.load == pytest.approx(0.28)
    assert found.deadline(wanted, 1) > 4 * 0.58
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
