"""What a draft elsewhere is sent next. Would catch keys and values that are sent twice, or not again where a text was
taken back; a token sent before what lies before it, or when the model is further on; words of another text.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smoe.cluster import draft_frames, frames
from smoe.cluster.draft_frames import ExpectedExperts
from smoe.cluster.following import Following
from smoe.cluster.frames import FrameError, FrameKind
from smoe.errors import EngineStateError
from tests.listener import Heard

BYTES = draft_frames.PART_BYTES // 10
"""Of a position."""


class Cache:
    """In a cache's place."""

    def __init__(self, length: int) -> None:
        self.length, self.rows, self.position_bytes, self.is_retired = length, 1, BYTES, False

    def taken_out(self, begin: int, end: int) -> torch.Tensor:
        if self.is_retired:
            raise EngineStateError("gone")
        return torch.zeros((end - begin) * BYTES, dtype=torch.uint8)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def following(heard: Heard) -> Following:
    """A draft is there; two layers of four experts, two named."""
    found = Following({}, {0: 4, 1: 4}, {0: 2, 1: 2}, 50)
    found.send_to(heard)
    found.reset(True)
    return found


def cache_of(length: int) -> Any:
    return Cache(length)


def sent(following: Following, may_send_keys: bool = True) -> list[Any]:
    """All that there is to send: (begin, end) of keys, (position, token), or None."""
    found: list[Any] = []
    while (parts := following.next_message(may_send_keys)) is not None:
        frame = frames.parse([bytes(part) for part in parts])
        if frame.kind is FrameKind.KEYS:
            found.append(draft_frames.parse_keys(frame, BYTES, 50)[1:3])
        else:
            step = draft_frames.parse_follow(frame)
            found.append(None if step is None else step[1:])
    return found


def says(following: Following, *said: ExpectedExperts, other: int = 0) -> None:
    text = following._text + other
    following.receive(frames.parse([bytes(part) for part in draft_frames.expected(text, said)]))


def test_keys_go_first_in_parts_and_once(following: Following) -> None:
    cache = cache_of(23)
    following.begin(7, cache)
    assert sent(following, may_send_keys=False) == []
    assert sent(following) == [(0, 10), (10, 20), (20, 23), (23, 7)]
    assert sent(following) == []
    cache.length = 24
    following.begin(8, cache)
    assert sent(following) == [(23, 24), (24, 8)]
    assert following.steps == 2 and following.nbytes == 24 * BYTES


def test_the_newest_token_alone_is_sent(following: Following) -> None:
    cache = cache_of(23)
    following.begin(7, cache)
    following.next_message(True)
    for cache.length in (24, 25):
        following.begin(8, cache)
    assert sent(following) == [(10, 20), (20, 25), (25, 8)]


def test_what_was_written_anew_is_sent_anew(following: Following) -> None:
    cache = cache_of(9)
    following.begin(7, cache)
    sent(following)
    cache.length = 4
    following.begin(7, cache)
    assert sent(following) == [(4, 7)]
    cache.length = 3
    following.pause(cache)
    cache.length = 9
    assert sent(following) == [None]
    following.begin(7, cache)
    assert sent(following) == [(3, 9), (9, 7)]
    following.begin(7, cache_of(2))
    assert sent(following) == [(0, 2), (2, 7)], "another text"


def test_nothing_is_sent_where_nobody_is_or_there_is_no_room(following: Following) -> None:
    cache = cache_of(49)
    following.begin(7, cache)
    sent(following)
    cache.length = 50
    following.begin(7, cache)
    assert sent(following) == [None] and following.predicted() == ([], [])
    following.reset(False)
    following.begin(7, cache_of(3))
    assert sent(following) == []
    following.reset(True)
    assert sent(following) == [(0, 3), (3, 7)]


def test_a_cache_that_was_given_up_is_no_end(following: Following) -> None:
    gone = cache_of(3)
    gone.is_retired = True
    following.begin(7, gone)
    assert sent(following) == []
    following.begin(7, cache_of(3))
    assert sent(following) == [(0, 3), (3, 7)]


def test_what_is_said_reaches_the_listener_and_the_next_token(following: Following, heard: Heard) -> None:
    cache = cache_of(3)
    following.begin(7, cache)
    heard.said.clear()
    says(
        following, ExpectedExperts(3, 7, 0, (2, 1)), ExpectedExperts(3, 7, 1, (0, 3)), ExpectedExperts(4, 9, 0, (1, 2))
    )
    assert heard.said == [(3, 0, 2, 1), (3, 1, 0, 3), (4, 0, 1, 2)] and following.layers == 3
    now, after = following.predicted()
    assert [each.experts for each in now] == [(2, 1), (0, 3)] and [each.experts for each in after] == [(1, 2)]
    cache.length = 4
    following.begin(9, cache)
    assert len(heard.said) == 3 and following.predicted()[0] == after, "as it had guessed: nothing is taken back"
    cache.length = 5
    following.begin(1, cache)
    assert heard.said[3:] == [(5,)] and following.predicted() == ([], [])


def test_what_is_of_no_use_is_not_heard(following: Following, heard: Heard) -> None:
    following.begin(7, cache_of(3))
    heard.said.clear()
    says(
        following, ExpectedExperts(3, 8, 0, (2, 1)), ExpectedExperts(2, 7, 0, (2, 1)), ExpectedExperts(5, 7, 0, (2, 1))
    )
    says(following, ExpectedExperts(3, 7, 0, (2, 1)), other=-1)
    following.pause()
    says(following, ExpectedExperts(3, 7, 0, (2, 1)))
    assert not heard.said and following.predicted() == ([], []) and following.layers == 0
    with pytest.raises(FrameError):
        says(following, ExpectedExperts(3, 7, 2, (2, 1)))


def test_who_has_gone_has_said_nothing(following: Following, heard: Heard) -> None:
    following.begin(7, cache_of(3))
    says(following, ExpectedExperts(3, 7, 0, (2, 1)))
    heard.said.clear()
    following.reset(False)
    assert heard.said == [(3,)] and following.predicted() == ([], [])
    following.close()
    following.close()
    assert sent(following) == []
