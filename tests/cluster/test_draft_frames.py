"""What is sent to a draft, and what it says, is what comes; what is no such message is refused. Would catch keys and
values written beyond a cache, an expert that there is not, lengths that are believed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.cluster import draft_frames, frames
from smoe.cluster.draft_frames import MOST_PREDICTIONS, ExpectedExperts, Follow, Keys
from smoe.cluster.frames import Frame, FrameError

EXPERTS = {0: 8, 1: 8, 3: 16}
NAMED = {0: 2, 1: 2, 3: 3}
POSITION_BYTES, CAPACITY = 24, 100


def sent(parts: list[Any]) -> Frame:
    return frames.parse([bytes(part) for part in parts])


def said(layer: int = 3, experts: tuple[int, ...] = (15, 0, 7)) -> ExpectedExperts:
    return ExpectedExperts(9, 1234, layer, experts)


def test_everything_comes_as_it_was_sent() -> None:
    step = Follow(1 << 61, 7, 32000)
    assert draft_frames.parse_follow(sent(draft_frames.follow(step))) == step
    assert draft_frames.parse_follow(sent(draft_frames.pause(5))) is None
    rows = bytes(range(3 * POSITION_BYTES))
    found = draft_frames.parse_keys(sent(draft_frames.keys(5, 4, 7, memoryview(rows))), POSITION_BYTES, CAPACITY)
    assert found._replace(rows=bytes(found.rows)) == Keys(5, 4, 7, rows)
    assert sent(draft_frames.taken(5)).request == 5
    many = [said(), said(0, (7, 1)), ExpectedExperts(10, 0, 1, (0, 1))]
    assert draft_frames.parse_expected(sent(draft_frames.expected(5, many)), EXPERTS, NAMED) == many


PARSERS: list[tuple[list[Any], Callable[[Frame], Any]]] = [
    (draft_frames.follow(Follow(5, 7, 3)), draft_frames.parse_follow),
    (
        draft_frames.keys(5, 4, 6, memoryview(bytes(2 * POSITION_BYTES))),
        lambda frame: draft_frames.parse_keys(frame, POSITION_BYTES, CAPACITY),
    ),
    (
        draft_frames.expected(5, [said(), said(1, (1, 0))]),
        lambda frame: draft_frames.parse_expected(frame, EXPERTS, NAMED),
    ),
]


@given(data=st.data())
@pytest.mark.parametrize(("parts", "parse"), PARSERS, ids=["follow", "keys", "expected"])
def test_a_message_with_any_part_changed_is_refused_or_well_formed(
    parts: list[Any], parse: Callable[[Frame], Any], data: st.DataObject
) -> None:
    parts = [bytes(part) for part in parts]
    which = data.draw(st.integers(0, len(parts) - 1))
    parts[which] = data.draw(st.binary(max_size=len(parts[which]) + 8))
    if data.draw(st.booleans()):
        parts = parts[:-1] if data.draw(st.booleans()) else [*parts, b"more"]
    try:
        found = parse(frames.parse(parts))
    except FrameError:
        return
    if isinstance(found, Keys):
        assert 0 <= found.begin < found.end <= CAPACITY
        assert len(found.rows) == (found.end - found.begin) * POSITION_BYTES
    elif isinstance(found, list):
        assert all(len(set(each.experts)) == NAMED[each.layer] for each in found)
        assert all(0 <= expert < EXPERTS[each.layer] for each in found for expert in each.experts)


@pytest.mark.parametrize(
    ("begin", "end", "nbytes"),
    [(5, 5, 0), (6, 5, 24), (99, 101, 48), (0, 2, 24), (0, 2, 49), (2**32 - 1, 2**32 - 1, 0)],
)
def test_keys_that_have_no_place_are_refused(begin: int, end: int, nbytes: int) -> None:
    frame = sent(draft_frames.keys(5, begin, end, memoryview(bytes(nbytes))))
    with pytest.raises(FrameError):
        draft_frames.parse_keys(frame, POSITION_BYTES, CAPACITY)


@pytest.mark.parametrize(
    "wrong",
    [said(layer=2), said(experts=(1, 2)), said(experts=(1, 2, 16)), said(experts=(1, 2, 2)), said(experts=())],
    ids=["layer", "too few", "expert", "twice", "none"],
)
def test_experts_that_cannot_be_are_refused(wrong: ExpectedExperts) -> None:
    with pytest.raises(FrameError):
        draft_frames.parse_expected(sent(draft_frames.expected(5, [said(), wrong])), EXPERTS, NAMED)


def test_more_layers_than_a_message_has_are_refused() -> None:
    most = [said()] * MOST_PREDICTIONS
    assert draft_frames.parse_expected(sent(draft_frames.expected(5, most)), EXPERTS, NAMED) == most
    with pytest.raises(FrameError):
        draft_frames.parse_expected(sent(draft_frames.expected(5, [*most, said()])), EXPERTS, NAMED)
    with pytest.raises(FrameError):
        draft_frames.parse_expected(sent(draft_frames.expected(5, [])), EXPERTS, NAMED)
