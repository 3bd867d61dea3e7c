"""What workers are told ahead. Would catch: somebody told twice or of more than fits, what was said of the next token
said again when it comes, room that never gets free.
"""

from __future__ import annotations

from smoe.cluster.told import Told
from smoe.expert import EXACT, ExpertKey


def keys(layer: int, *experts: int) -> dict[ExpertKey, int]:
    """All for worker 2."""
    return dict.fromkeys(((layer, expert, EXACT) for expert in experts), 2)


def test_nothing_is_told_twice() -> None:
    told = Told()
    assert told.new(3, False, (1, 2)) == list(keys(3, 1, 2))
    assert told.tell(False, keys(3, 1, 2), {2: 9}) == {2: list(keys(3, 1, 2))}
    assert told.new(3, False, (1, 2, 5)) == list(keys(3, 5))
    assert told.new(3, True, (1, 2)) == list(keys(3, 1, 2)), "the next token wants it again"
    assert told.outstanding(2) == 2 and told.outstanding(3) == 0


def test_no_more_than_fits_and_room_is_given_back() -> None:
    told = Told()
    assert told.tell(False, keys(1, 4, 5, 6), {2: 2}) == {2: list(keys(1, 4, 5))}
    assert told.tell(False, keys(2, 7), {2: 2}) == {}
    told.ask(1)
    assert told.tell(False, keys(2, 7), {2: 2}) == {}, "it is about to use what it has: with no room, that would go"
    told.ask(2)
    assert told.outstanding(2) == 0
    assert told.tell(False, keys(3, 7), {2: 2}) == {2: list(keys(3, 7))}


def test_what_somebody_was_given_is_known() -> None:
    told = Told()
    told.tell(False, keys(1, 4, 5) | {(1, 6, EXACT): 0}, {2: 9, 0: 9})
    assert told.given(2, 1, False) == [4, 5] and told.given(0, 1, False) == [6]
    assert told.given(2, 1, True) == [] and told.given(2, 2, False) == []


def test_the_next_token_becomes_this_one() -> None:
    told = Told()
    told.tell(False, keys(5, 1), {2: 9})
    told.tell(True, keys(0, 1), {2: 9})
    told.begin_token()
    assert told.outstanding(2) == 1, "what was never asked for is forgotten"
    assert told.new(0, False, (1, 3)) == list(keys(0, 3))
    told.ask(0)
    assert told.new(0, False, (1,)) == list(keys(0, 1))
