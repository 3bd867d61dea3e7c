"""The text of a coordinator elsewhere, as a draft has it. Would catch rows of an earlier text that stay, a token that
is decoded before what lies before it has come, a cache that changes while the draft reads it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smoe.models.kv_cache import RowCache
from smoe.runtime.read_along import ReadAlong
from tests import zoo

CAPACITY = 20


class Ahead:
    """In the place of a thread that runs ahead."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        """(token, positions before it)."""
        self.calls: list[str] = []
        self.cache: Any = None

    def begin(self, token: int, cache: RowCache) -> None:
        self.begun.append((token, cache.length))
        self.calls.append("begin")
        self.cache = cache

    def pause(self, cache: RowCache | None = None) -> None:
        self.calls.append("pause" if cache is None else f"pause at {cache.length}")

    def wait(self, seconds: float) -> bool:
        self.calls.append("wait")
        return seconds > 0

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def theirs() -> RowCache:
    """Main's cache: 12 positions of drawn keys and values."""
    config = zoo.make("mixtral").config
    cache = RowCache(config, 1, 30)
    cache.begin(12, 1)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12, 16), layer)
    cache.commit()
    return cache


@pytest.fixture
def ahead() -> Ahead:
    return Ahead()


@pytest.fixture
def along(theirs: RowCache, ahead: Any) -> ReadAlong:
    config = zoo.make("mixtral").config
    pattern = RowCache(config, 1, 1)
    pattern.take_over(theirs, 0, 1)
    return ReadAlong(ahead, config, pattern, CAPACITY, 0)


def learn(along: ReadAlong, theirs: RowCache, begin: int, end: int, text: int = 5) -> None:
    rows: Any = theirs.taken_out(begin, end).numpy()
    along.learn(text, begin, end, memoryview(rows))


def test_a_token_is_decoded_behind_what_has_come(along: ReadAlong, ahead: Ahead, theirs: RowCache) -> None:
    learn(along, theirs, 0, 8)
    learn(along, theirs, 8, 10)
    along.begin(5, 10, 7)
    learn(along, theirs, 10, 11)
    along.begin(5, 11, 8)
    assert ahead.begun == [(7, 10), (8, 11)] and ahead.calls[-2:] == ["begin", "begin"], "nothing was interrupted"
    assert torch.equal(ahead.cache.taken_out(0, 11), theirs.taken_out(0, 11))


def test_a_text_that_was_taken_back_is_read_anew_from_there(along: ReadAlong, ahead: Ahead, theirs: RowCache) -> None:
    learn(along, theirs, 0, 10)
    along.begin(5, 10, 7)
    ahead.calls.clear()
    theirs.rewind(4)
    theirs.begin(4, 1)
    for layer in range(len(theirs.layers)):
        theirs.update(torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 16), layer)
    theirs.commit()
    learn(along, theirs, 4, 8)
    assert ahead.calls == ["pause at 10", "wait", "pause at 4"], "before anything is written"
    along.begin(5, 8, 9)
    assert ahead.begun[-1] == (9, 8) and torch.equal(ahead.cache.taken_out(0, 8), theirs.taken_out(0, 8))
    along.begin(5, 3, 1)
    assert ahead.begun[-1] == (1, 3)


def test_another_text_has_nothing_of_the_one_before(along: ReadAlong, ahead: Ahead, theirs: RowCache) -> None:
    learn(along, theirs, 0, 10)
    with pytest.raises(ValueError, match="values of 0 of the 10 earlier positions"):
        along.begin(6, 10, 7)
    learn(along, theirs, 0, 2, text=7)
    along.begin(7, 2, 7)
    assert ahead.begun == [(7, 2)]


def test_what_has_a_gap_or_no_room_is_refused(along: ReadAlong, ahead: Ahead, theirs: RowCache) -> None:
    learn(along, theirs, 0, 5)
    with pytest.raises(ValueError, match="values of 5 of the 6 earlier positions"):
        along.begin(5, 6, 7)
    with pytest.raises(ValueError, match="cannot be appended"):
        learn(along, theirs, 6, 8)
    for begin in range(5, CAPACITY):
        rows: Any = theirs.taken_out(5, 6).numpy()
        along.learn(5, begin, begin + 1, memoryview(rows))
    with pytest.raises(ValueError, match=f"room for {CAPACITY} positions"):
        along.begin(5, CAPACITY, 7)
    assert not ahead.begun
    along.close()
    assert ahead.calls[-1] == "close"
