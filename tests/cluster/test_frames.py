"""What is sent is what comes; what is no message of ours is refused. Would catch an answer taken for another's, memory
taken by a length that a stranger named, a token index beyond the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smoe.cluster import frames
from smoe.cluster.frames import FrameError, FrameKind, Times
from smoe.compute.unit import ExpertTask
from smoe.expert import EXACT

EXPERTS = {0: 8, 1: 8, 3: 16}
HIDDEN = 12


def sent(parts: list[Any]) -> frames.Frame:
    return frames.parse([bytes(part) for part in parts])


@given(
    asks=st.lists(
        st.tuples(st.sampled_from([0, 1, 3]), st.integers(0, 7), st.lists(st.integers(0, 4), min_size=1, max_size=6)),
        min_size=1,
        max_size=5,
    ),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_work_comes_as_it_was_sent(asks: list[tuple[int, int, list[int]]], dtype: torch.dtype) -> None:
    wanted = [ExpertTask((layer, expert, EXACT), tokens) for layer, expert, tokens in asks]
    hidden = torch.randn(5, HIDDEN).to(dtype)
    frame = sent(frames.work(7, wanted, hidden))
    found = frames.parse_work(frame, EXPERTS, HIDDEN)
    assert frame.request == 7
    assert found.wanted == wanted
    assert torch.equal(found.hidden, hidden)


def test_without_torch_the_same_bits_travel() -> None:
    hidden, wanted = (
        torch.randn(5, HIDDEN).bfloat16(),
        [ExpertTask((0, 1, EXACT), [0, 4]), ExpertTask((0, 2, EXACT), [3])],
    )
    bits = hidden.view(torch.uint16).numpy().astype(np.uint16)
    came = frames.parse_work(sent(frames.work(7, wanted, hidden)), EXPERTS, HIDDEN, as_bits=True)
    assert [(each.key, list(each.tokens)) for each in came.wanted] == [((0, 1, EXACT), [0, 4]), ((0, 2, EXACT), [3])]
    assert isinstance(came.hidden, np.ndarray) and (came.hidden == bits).all()
    ours = frames.done(7, Times(1.0, 0.5), [bits[:2], bits[4:]])
    theirs = frames.done(7, Times(1.0, 0.5), [hidden[:2], hidden[4:]])
    assert [bytes(part) for part in ours] == [bytes(part) for part in theirs]
    with pytest.raises(frames.FrameError, match="F32"):
        frames.parse_work(sent(frames.work(7, wanted, hidden.float())), EXPERTS, HIDDEN, as_bits=True)


def test_answers_and_words_come_as_they_were_sent() -> None:
    rows = [torch.randn(2, HIDDEN).bfloat16(), torch.randn(1, HIDDEN).bfloat16()]
    found = frames.parse_done(sent(frames.done(9, Times(0.5, 0.25, 0.75, 2), rows)), 3, HIDDEN, torch.bfloat16)
    assert torch.equal(found.rows, torch.cat(rows))
    assert found.times == Times(0.5, 0.25, 0.75, 2)
    assert frames.fields_of(sent(frames.talk(FrameKind.HELLO, {"name": "ä"}))) == {"name": "ä"}
    assert frames.parse_fetch(sent(frames.fetch([(3, 9, EXACT)])), EXPERTS) == [(3, 9, EXACT)]
    assert frames.text_of(sent(frames.failed(3, "bad\x1b[31m"))) == "bad[31m", "nothing that steers a terminal"
    assert sent(frames.alone(FrameKind.BEAT)).kind is FrameKind.BEAT


@given(parts=st.lists(st.binary(max_size=64), max_size=5))
def test_noise_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(FrameError):
        frames.parse(parts)


@given(data=st.data())
def test_a_message_with_any_part_changed_is_refused_or_well_formed(data: st.DataObject) -> None:
    wanted = [ExpertTask((0, 3, EXACT), [0, 2]), ExpertTask((3, 15, EXACT), [1])]
    parts = [bytes(part) for part in frames.work(1, wanted, torch.zeros(3, HIDDEN))]
    which = data.draw(st.integers(0, len(parts) - 1))
    parts[which] = data.draw(st.binary(max_size=len(parts[which]) + 8))
    try:
        found = frames.parse_work(frames.parse(parts), EXPERTS, HIDDEN)
    except FrameError:
        return
    assert all(0 <= key[1] < EXPERTS[key[0]] for key, _ in found.wanted)
    assert all(token < len(found.hidden) for _, tokens in found.wanted for token in tokens)


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts[:-1],
        lambda parts: [*parts, b""],
        lambda parts: [parts[0], parts[1], parts[2], parts[3][:-2]],
        lambda parts: [b"XMOE" + parts[0][4:], *parts[1:]],
        lambda parts: [parts[0][:4] + bytes([frames.VERSION + 1]) + parts[0][5:], *parts[1:]],
    ],
    ids=["part missing", "part too many", "rows cut short", "other magic", "other version"],
)
def test_what_contradicts_itself_is_refused(change: Any) -> None:
    parts = [bytes(part) for part in frames.work(1, [ExpertTask((0, 1, EXACT), [0])], torch.zeros(1, HIDDEN))]
    with pytest.raises(FrameError):
        frames.parse_work(frames.parse(change(parts)), EXPERTS, HIDDEN)


@pytest.mark.parametrize(
    "times",
    [
        (float("nan"), 0.0),
        (1.0, 2.0),
        (-1.0, -1.0),
        (float("inf"), 0.0),
        (1.0, 1.0, float("nan"), 1),
        (1.0, 1.0, -1.0, 1),
        (1.0, 1.0, 1.0, float("nan")),
        (1.0, 1.0, 1.0, 2),
    ],
)
def test_times_that_cannot_be_are_refused(times: Any) -> None:
    frame = sent(frames.done(1, Times(*times), [torch.zeros(1, HIDDEN)]))
    with pytest.raises(FrameError):
        frames.parse_done(frame, 1, HIDDEN, torch.float32)


@given(rows=st.integers(1, 4000), hidden=st.sampled_from([1, 64, 4096]), experts=st.integers(1, 8))
def test_a_part_is_as_long_as_planned_at_most(rows: int, hidden: int, experts: int) -> None:
    """Whatever the experts that the rows are shared out to."""
    experts = min(experts, rows)
    planned = frames.RowFormat(hidden, torch.bfloat16, rows)
    counts = [rows - experts + 1, *[1] * (experts - 1)]
    wanted = [ExpertTask((0, n % 8, EXACT), range(count)) for n, count in enumerate(counts)]
    sent_parts = frames.work(1, wanted, torch.zeros(max(counts), hidden, dtype=torch.bfloat16))
    came_parts = frames.done(1, Times(0.0, 0.0), [torch.zeros(count, hidden, dtype=torch.bfloat16) for count in counts])
    words = frames.failed(1, "x" * 10**6)
    longest = max(len(memoryview(part)) for part in [*sent_parts, *came_parts, *words])
    assert longest < planned.part_bytes <= max(2 * rows * max(hidden, 8), 1 << 16) + 1024


def test_no_part_is_longer_than_any_may_be() -> None:
    planned = frames.RowFormat(16384, torch.float32, 10**6)
    assert planned.part_bytes == frames.MOST_BYTES and planned.fitting.part_bytes <= frames.MOST_BYTES
    assert 0 < planned.fitting.most < 10**6
