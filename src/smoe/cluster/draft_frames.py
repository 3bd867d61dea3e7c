"""The messages between the coordinator and a draft model on another machine, after their greeting.

    follow     header (text) | u32 [position, token]; without a body: nothing that a draft model can follow
    keys       header (text) | u32 [begin, end] | keys and values, in the format of `RowCache.taken_out`
    taken      header (text): from the draft model, as the next
    expected   header (text) | u32 [n, 4]: position, token, layer, experts | u32 [experts of all]

In a header, *text* is the number by which the coordinator identifies the text that it decodes. Messages about another
text are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from smoe.cluster import frames
from smoe.cluster.frames import WHOLE, Frame, FrameError, FrameKind, parts_of, whole_numbers

PART_BYTES = 1 << 17
"""The maximum number of bytes of keys and values in one message. If one position has more bytes, a message contains
that one position."""
MOST_BYTES = 1 << 24
"""The maximum number of bytes of a message part sent to a draft model. It is large enough for the keys and values of
one position of any model."""
MOST_PREDICTIONS = 64
"""The maximum number of layers whose predictions one message contains."""


class Follow(NamedTuple):
    """The token that the coordinator decodes now, and the token's position."""

    text: int
    position: int
    token: int


class Keys(NamedTuple):
    """Keys and values of consecutive positions of a text."""

    text: int
    begin: int
    end: int
    rows: Any
    """The bytes of the keys and values."""


class ExpectedExperts(NamedTuple):
    """A draft model's prediction for one layer."""

    position: int
    token: int
    layer: int
    experts: tuple[int, ...]
    """The experts in order of preference, best first."""


def follow(step: Follow) -> list[Any]:
    """Return the message that tells a draft model which token the coordinator decodes, and its position."""
    return [*frames.alone(FrameKind.FOLLOW, step.text), _numbers([step[1:]])]


def pause(text: int) -> list[Any]:
    """Return the message that tells a draft model to pause, because it cannot follow the coordinator's next passes,
    such as those of a prompt."""
    return frames.alone(FrameKind.FOLLOW, text)


def parse_follow(frame: Frame) -> Follow | None:
    """Return the token and position of a FOLLOW message, or None if the message means a pause. Raises `FrameError` for
    an invalid message."""
    if not frame.body:
        return None
    (part,) = parts_of(frame, 1)
    found = whole_numbers(part, 2).tolist()
    if len(found) != 1:
        raise FrameError("a FOLLOW message has more than one token")
    position, token = found[0]
    return Follow(frame.request, position, token)


def keys(text: int, begin: int, end: int, rows: memoryview) -> list[Any]:
    """Return the message with keys and values of positions `begin` to `end`."""
    return [*frames.alone(FrameKind.KEYS, text), _numbers([(begin, end)]), rows]


def parse_keys(frame: Frame, position_bytes: int, capacity: int) -> Keys:
    """Return the keys and values of a KEYS message. `position_bytes`: the bytes of one position; `capacity`: the
    maximum number of positions of a text. Raises `FrameError` for an invalid message."""
    part, rows = parts_of(frame, 2)
    found = whole_numbers(part, 2).tolist()
    begin, end = found[0] if len(found) == 1 else (0, 0)
    if not begin < end <= capacity or len(memoryview(rows)) != (end - begin) * position_bytes:
        raise FrameError(
            f"a KEYS message for positions {begin} to {end} has {len(memoryview(rows))} bytes of keys and values; "
            f"{position_bytes} bytes are needed for each position, and the last position must be at most {capacity}"
        )
    return Keys(frame.request, begin, end, rows)


def taken(text: int) -> list[Any]:
    """Return the message by which a draft model confirms that it has received keys and values."""
    return frames.alone(FrameKind.TAKEN, text)


def expected(text: int, predictions: Sequence[ExpectedExperts]) -> list[Any]:
    """Return the message with a draft model's predictions for at most `MOST_PREDICTIONS` layers."""
    heads = [(each.position, each.token, each.layer, len(each.experts)) for each in predictions]
    return [
        *frames.alone(FrameKind.EXPECTED, text),
        _numbers(heads),
        _numbers([[n] for each in predictions for n in each.experts]),
    ]


def parse_expected(frame: Frame, experts: Mapping[int, int], named: Mapping[int, int]) -> list[ExpectedExperts]:
    """Return the predictions in an EXPECTED message. `experts`: each layer's number of experts; `named`: how many
    experts are predicted for each layer. Raises `FrameError` for an invalid message."""
    heads, every = (
        whole_numbers(part, columns).tolist() for part, columns in zip(parts_of(frame, 2), (4, 1), strict=True)
    )
    if not 0 < len(heads) <= MOST_PREDICTIONS or sum(count for *_, count in heads) != len(every):
        raise FrameError("the number of experts in a draft model's message differs from its list of predictions")
    predictions, at = [], 0
    for position, token, layer, count in heads:
        of_layer = tuple(n for (n,) in every[at : at + count])
        if count != named.get(layer) or len(set(of_layer)) != count or max(of_layer) >= experts[layer]:
            raise FrameError(
                f"the draft model's message predicts the experts {of_layer} for layer {layer}; the layer has no such "
                "experts, or their number is wrong, or one is named twice"
            )
        predictions.append(ExpectedExperts(position, token, layer, of_layer))
        at += count
    return predictions


def _numbers(rows: Sequence[Sequence[int]]) -> bytes:
    return np.array(rows, WHOLE).tobytes()
