"""The description of a model's experts that a coordinator sends to workers without torch. Such a worker has the model's
files and our kernels.

    worker        DESCRIBE (its name and checksum) -->                           opens its own files: HELLO
    coordinator                                    <-- EXPERTS: keys, sizes, table

The library's conversion rules say which stored tensors form an expert, and the coordinator applies them. The activation
is a table that the coordinator's torch has computed (`kernels/elementwise.py`). So this module knows nothing about
model families, and received data is never executed: keys are looked up in the worker's own files, and sizes compared
with them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import zmq

from smoe.cluster import frames
from smoe.cluster.dial import dial, refusal, watched
from smoe.cluster.frames import Frame, FrameError, FrameKind
from smoe.cluster.stored_identity import Worker
from smoe.errors import ClusterError
from smoe.kernels.experts import Bits

NUMBER = "*"
"""The placeholder for an expert's number in a tensor name. A name without the placeholder belongs to a fused tensor,
which has all experts of the layer, one after the other."""
MOST_BYTES = 1 << 22
"""The size limit of a description, in bytes."""
_VALUES = 1 << 16
_MOST = 1 << 24
"""The upper bound of every number in a description, such as the number of experts or H."""
_MOST_PIECES = 16
_ASK_SECONDS = 0.5
_TURN_SECONDS = 0.1


class LayerKeys(NamedTuple):
    """The tensor names of a layer's experts: names with the placeholder `NUMBER` for one expert each, or names of fused
    tensors."""

    layer: int
    experts: int
    up: tuple[str, ...]
    """The names of the gate and up tensors, whose rows together are [2I, H]."""
    down: tuple[str, ...]
    """The name of the down tensor [H, I]."""


class Description(NamedTuple):
    """A description of a model's experts. All have one shape, bf16 weights and a gated activation."""

    weights: str
    """The checksum of the checkpoint."""
    hidden: int
    inner: int
    layers: tuple[LayerKeys, ...]
    table: Bits
    """[65536] the activation function's value for every bf16 number."""


def experts(description: Description) -> list[Any]:
    """Return the EXPERTS message of a description."""
    fields = description._asdict()
    table: Any = np.ascontiguousarray(fields.pop("table"), "<u2")
    return [*frames.alone(FrameKind.EXPERTS), json.dumps(fields).encode(), memoryview(table).cast("B")]


def parse_experts(frame: Frame) -> Description:
    """Parse an EXPERTS message. Raises `FrameError` for an invalid one."""
    if len(frame.body) != 2 or any(len(memoryview(part)) > MOST_BYTES for part in frame.body):
        raise FrameError(
            "an EXPERTS message must have two parts, the description of the experts and the table of the "
            f"activation, of at most {MOST_BYTES} bytes each"
        )
    words, table = (bytes(part) for part in frame.body)
    try:
        fields = json.loads(words)
        layers = tuple(_layer(each) for each in fields["layers"])
        weights, hidden, inner = fields["weights"], _size(fields["hidden"]), _size(fields["inner"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError(f"the description of the experts in an EXPERTS message is invalid: {error}") from error
    if not isinstance(weights, str) or not layers or len(table) != 2 * _VALUES:
        raise FrameError(
            "the description of the experts in an EXPERTS message lacks the checksum, the layers or values of the "
            "activation"
        )
    return Description(weights, hidden, inner, layers, np.frombuffer(table, "<u2"))


def _layer(fields: Any) -> LayerKeys:
    layer, count, up, down = fields
    if type(layer) is not int or not 0 <= layer < _MOST:
        raise ValueError("not a layer number")
    return LayerKeys(layer, _size(count), _keys(up), _keys(down))


def _size(fields: Any) -> int:
    if type(fields) is not int or not 1 <= fields <= _MOST:
        raise ValueError(f"{fields!r:.40} is not a size")
    return fields


def _keys(fields: Any) -> tuple[str, ...]:
    if (
        not isinstance(fields, list)
        or not 1 <= len(fields) <= _MOST_PIECES
        or not all(isinstance(k, str) for k in fields)
    ):
        raise ValueError(f"{fields!r:.40} is not a list of 1 to {_MOST_PIECES} tensor names")
    return tuple(fields)


def ask(me: Worker, fields: dict[str, Any], check: Callable[[], None]) -> Description:
    """Ask the coordinator for the description of its experts, and repeat the request until a reply comes. Return the
    description. `fields` describe the worker. `check` is called ten times a second, and may end this by an exception.
    Raises `ClusterError` if the coordinator refuses, or sends an invalid message."""
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as dealer, watched(dealer, me) as check_known:
            dial(dealer, me, MOST_BYTES)
            asked = -_ASK_SECONDS
            while True:
                check()
                if time.monotonic() - asked > _ASK_SECONDS:
                    asked = time.monotonic()
                    if dealer.poll(0, zmq.POLLOUT):
                        dealer.send_multipart(frames.talk(FrameKind.DESCRIBE, fields), zmq.NOBLOCK)
                if not dealer.poll(int(1000 * _TURN_SECONDS)):
                    check_known()
                    continue
                found = _answer_of(me, dealer.recv_multipart())
                if found is not None:
                    return found
    finally:
        context.destroy(linger=0)  # also a socket that an interrupt has left open, which `term` would wait for


def _answer_of(me: Worker, parts: list[bytes]) -> Description | None:
    try:
        frame = frames.parse(parts)
        if frame.kind is FrameKind.REFUSED:
            raise refusal(me, frame)
        return parse_experts(frame) if frame.kind is FrameKind.EXPERTS else None
    except FrameError as error:
        raise ClusterError(f"the coordinator sent an invalid message: {error}") from error
