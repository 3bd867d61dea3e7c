"""The messages between coordinator and workers: fixed binary frames, each one ZeroMQ message of a few parts.

    header (20 bytes)    "SMOE" | version u8 | kind u8 | dtype u8 | - | request u64 | rows u32
    text                 header | JSON object                          HELLO, WELCOME, REFUSED
    work                 header | asks u32 [n, 3] | tokens u32 [t] | hidden [rows, H]
    done                 header | times f64 [4] | rows [sum, H]
    failed               header | text
    fetch                header | experts u32 [n, 2]
    beat, leave          header
    experts              header | JSON object | table [65536]        the reply to DESCRIBE: `described.py`
    draft models         in `draft_frames.py`

Nothing is unpickled or evaluated. Lengths are checked against each other before memory is allocated; the sender of an
inconsistent message is disconnected.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from smoe.compute.unit import ExpertTask
from smoe.expert import EXACT, ExpertKey
from smoe.memory.safetensors_index import ITEM_BYTES
from smoe.memory.store import EXPERT_DTYPES

if TYPE_CHECKING:
    import torch

    from smoe.kernels.experts import Bits

VERSION = 3
MOST_BYTES = 1 << 30
"""The maximum number of bytes of a message part, for every model. A longer part is not received."""
_MOST_TALK = 1 << 16
_OVERHEAD = 1 << 10
"""An upper bound of the bytes that encryption adds to a message part."""
_ASK_BYTES = 16
"""The bytes of one row of a WORK message's tables. Each requested expert has at least one such row."""
_HEADER = struct.Struct("<4sBBBxQI")
_MAGIC = b"SMOE"
WHOLE = np.dtype("<u4")
"""The type of the numbers in tables."""
_BITS = np.dtype("<u2")
"""The bf16 data type as 16-bit integers, for machines without torch."""


class FrameKind(IntEnum):
    """The kind of a message."""

    HELLO = 1
    """A worker's identity and state."""
    WELCOME = 2
    """The worker is admitted. It may get a proof first, a test whose results the coordinator already knows."""
    REFUSED = 3
    """The worker is not admitted, with the reason."""
    WORK = 4
    """Compute experts for these rows."""
    DONE = 5
    """A worker sends the results of a request."""
    FAILED = 6
    """A worker reports that a request failed."""
    FETCH = 7
    """Load these experts soon."""
    BEAT = 8
    """The sender is alive. A machine that gets this message from the coordinator replies with the same message."""
    LEAVE = 9
    """The sender ends the connection."""
    DESCRIBE = 10
    """A worker without torch requests the description of experts."""
    EXPERTS = 11
    """The description of experts."""
    DRAFT = 12
    """A draft model's identity and state."""
    FOLLOW = 13
    """The coordinator decodes this token, or begins passes that a draft model cannot follow."""
    KEYS = 14
    """Keys and values of some positions."""
    TAKEN = 15
    """A machine reports that keys and values have arrived."""
    EXPECTED = 16
    """Experts that a draft model's routers have chosen."""


class FrameError(Exception):
    """Raised for a message that has another format, or whose lengths contradict each other."""


class RowFormat(NamedTuple):
    """The format of hidden states sent to workers and of the experts' outputs sent back."""

    numbers: int
    """H, the number of values in a row."""
    dtype: Any
    """The data type of a row: torch's dtype, or without torch a numpy dtype that holds the bits."""
    most: int
    """The largest number of rows of one request or result."""

    @property
    def part_bytes(self) -> int:
        """The maximum number of bytes of a message part for this model. A longer part is not received."""
        row_bytes: int = max(self.numbers * self.dtype.itemsize, _ASK_BYTES)
        return min(MOST_BYTES, max(_MOST_TALK, self.most * row_bytes) + _OVERHEAD)

    @property
    def fitting(self) -> RowFormat:
        """This format, with the number of rows limited so that one message can contain them."""
        row_bytes: int = max(self.numbers * self.dtype.itemsize, _ASK_BYTES)
        return self._replace(most=min(self.most, (MOST_BYTES - _OVERHEAD) // row_bytes))


class Frame(NamedTuple):
    """A message whose body has not been parsed."""

    kind: FrameKind
    request: int
    rows: int
    dtype: str
    """The dtype's name in safetensors."""
    body: Sequence[Any]
    """The parts after the header: `bytes` or memory views."""


class WorkFrame(NamedTuple):
    """A request to compute experts for some rows."""

    wanted: Sequence[ExpertTask]
    hidden: torch.Tensor | Bits
    """[rows, H] hidden states"""


class Times(NamedTuple):
    """The seconds that a worker spent on a request, and the number of experts that it loaded."""

    whole: float
    """Seconds from the request's arrival, or the end of the request before it, to its last result."""
    computing: float
    """The seconds of `whole` in which experts were computed."""
    loading: float = 0.0
    """Seconds of loading experts, partly while others were computed, so the request may have waited less."""
    loads: int = 0
    """The number of experts loaded."""


class DoneFrame(NamedTuple):
    """The experts' outputs for one request, as a worker returns them."""

    times: Times
    rows: torch.Tensor
    """[n, H], expert after expert in the order of the request."""


def parse(parts: Sequence[Any]) -> Frame:
    """Return a received message with its header parsed. Raises `FrameError` for an invalid header."""
    if not parts or len(parts) > 4 or len(memoryview(parts[0])) != _HEADER.size:
        raise FrameError("a received message has no header")
    magic, version, kind, dtype, request, rows = _HEADER.unpack(bytes(parts[0]))
    if magic != _MAGIC or version != VERSION:
        raise FrameError(
            f"a received message begins with {magic!r} and version {version} instead of {_MAGIC!r} and version "
            f"{VERSION}; all machines of a cluster need the same version of smoe"
        )
    if kind not in set(FrameKind) or dtype >= len(EXPERT_DTYPES):
        raise FrameError(
            f"a received message has kind {kind} and data type {dtype}, which this version of smoe does not know"
        )
    return Frame(FrameKind(kind), request, rows, EXPERT_DTYPES[dtype], parts[1:])


def talk(kind: FrameKind, fields_of: dict[str, Any]) -> list[Any]:
    """Return a message of this kind whose body is a JSON object."""
    return [_header(kind, 0), json.dumps(fields_of).encode()]


def fields_of(frame: Frame) -> dict[str, Any]:
    """Return the JSON object of a message. Raises `FrameError` for an invalid one."""
    if len(frame.body) != 1 or len(memoryview(frame.body[0])) > _MOST_TALK:
        raise FrameError("a message that should be a text has another number of parts")
    try:
        found = json.loads(bytes(frame.body[0]))
    except (ValueError, RecursionError) as error:
        raise FrameError("a message that should be JSON is not") from error
    if not isinstance(found, dict):
        raise FrameError("a message that should be a JSON object is not")
    return found


def work(request: int, wanted: Sequence[ExpertTask], hidden: torch.Tensor) -> list[Any]:
    """Return a WORK message. The hidden states `hidden` [rows, H] are sent once, however many experts use them."""
    asks = np.array([(layer, expert, len(tokens)) for (layer, expert, _), tokens in wanted], WHOLE)
    tokens = np.concatenate([np.asarray(each.tokens, WHOLE) for each in wanted])
    return [
        _header(FrameKind.WORK, request, hidden.shape[0], _name_of(hidden)),
        asks.tobytes(),
        tokens.tobytes(),
        _bytes_of(hidden),
    ]


def parse_work(frame: Frame, experts: Mapping[int, int], hidden: int, as_bits: bool = False) -> WorkFrame:
    """Return the request in a WORK message. `experts`: each layer's number of experts; `hidden`: H; `as_bits`: return
    rows as the bits of bf16 numbers, without torch. Raises `FrameError` for an invalid message."""
    asks_part, tokens_part, rows_part = parts_of(frame, 3)
    asks, tokens = whole_numbers(asks_part, 3), whole_numbers(tokens_part, 1)[:, 0]
    if len(memoryview(rows_part)) != frame.rows * hidden * ITEM_BYTES[frame.dtype]:
        raise FrameError("the rows of a message have another number of bytes than its header says")
    if not len(asks) or int(asks[:, 2].sum()) != len(tokens) or (len(tokens) and int(tokens.max()) >= frame.rows):
        raise FrameError(f"the token numbers in a WORK message do not match its experts or its {frame.rows} rows")
    wanted, begin = [], 0
    for layer, expert, count in asks.tolist():
        if expert >= experts.get(layer, 0) or not count:
            raise FrameError(
                f"a WORK message requests expert {expert} of layer {layer}, which has {experts.get(layer, 0)} experts, "
                f"for {count} tokens; an expert must exist and have at least one token"
            )
        wanted.append(ExpertTask((layer, expert, EXACT), tokens[begin : begin + count].tolist()))
        begin += count
    if as_bits and frame.dtype != "BF16":
        raise FrameError(f"the rows of a WORK message are in {frame.dtype} instead of BF16")
    return WorkFrame(wanted, _bits_of(rows_part, hidden) if as_bits else _rows_of(rows_part, frame.dtype, hidden))


def done(request: int, times: Times, rows: Sequence[torch.Tensor] | Sequence[Bits]) -> list[Any]:
    """Return a DONE message. `rows`: for every requested expert, in order, its output rows [n, H]."""
    together = _joined(rows)
    header = _header(FrameKind.DONE, request, together.shape[0], _name_of(together))
    return [header, np.array(times, np.float64).tobytes(), _bytes_of(together)]


def parse_done(frame: Frame, rows: int, hidden: int, dtype: torch.dtype) -> DoneFrame:
    """Return the results in the DONE message for a request of `rows` rows. Raises `FrameError` for an invalid
    message."""
    times_part, rows_part = parts_of(frame, 2)
    if frame.rows != rows or frame.dtype != _name_of_dtype(dtype) or len(memoryview(times_part)) != 32:
        raise FrameError(
            f"a DONE message has {frame.rows} rows of {frame.dtype} and {len(memoryview(times_part))} bytes of "
            f"times; it must have {rows} rows of {_name_of_dtype(dtype)} and 32 bytes of times"
        )
    if len(memoryview(rows_part)) != rows * hidden * dtype.itemsize:
        raise FrameError("the rows of a message have another number of bytes than its header says")
    whole, computing, loading, loads = np.frombuffer(times_part, np.float64).tolist()
    if not (0 <= computing <= whole < 1e6 and 0 <= loading < 1e6 and 0 <= loads <= rows):  # NaN too
        raise FrameError("a DONE message has impossible times")
    return DoneFrame(Times(whole, computing, loading, int(loads)), _rows_of(rows_part, frame.dtype, hidden))


def fetch(keys: Sequence[ExpertKey]) -> list[Any]:
    """Return a message that asks a worker to load these experts soon."""
    return [_header(FrameKind.FETCH, 0), np.array([key[:2] for key in keys], WHOLE).tobytes()]


def parse_fetch(frame: Frame, experts: Mapping[int, int]) -> list[ExpertKey]:
    """Return the experts that a FETCH message asks a worker to load. Raises `FrameError` for unknown experts."""
    (part,) = parts_of(frame, 1)
    found = whole_numbers(part, 2).tolist()
    if any(expert >= experts.get(layer, 0) for layer, expert in found):
        raise FrameError("a FETCH message names an expert that the model does not have")
    return [(layer, expert, EXACT) for layer, expert in found]


def alone(kind: FrameKind, request: int = 0) -> list[Any]:
    """Return a message of this kind that consists of a header only."""
    return [_header(kind, request)]


def failed(request: int, why: str) -> list[Any]:
    """Return the message by which a worker reports that a request failed, with the reason."""
    return [_header(FrameKind.FAILED, request), why.encode()[:_MOST_TALK]]


def text_of(frame: Frame) -> str:
    """Return the text of a FAILED message, without unprintable characters."""
    (part,) = parts_of(frame, 1)
    return "".join(c for c in bytes(part)[:2000].decode("utf8", "replace") if c.isprintable())


def _header(kind: FrameKind, request: int, rows: int = 0, dtype: str = EXPERT_DTYPES[0]) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, kind, EXPERT_DTYPES.index(dtype), request, rows)


def parts_of(frame: Frame, count: int) -> Sequence[Any]:
    """Return the parts of a message. Raises `FrameError` unless there are `count` parts."""
    if len(frame.body) != count:
        raise FrameError(f"a {frame.kind.name} message has {len(frame.body)} parts instead of {count}")
    return frame.body


def whole_numbers(part: Any, columns: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return a table of 32-bit numbers with this number of columns. Raises `FrameError` for an incomplete row."""
    if len(memoryview(part)) % (4 * columns):
        raise FrameError("a message has a truncated table")
    return np.frombuffer(part, WHOLE).reshape(-1, columns)


def _bytes_of(rows: torch.Tensor | Bits) -> memoryview:
    numbers: Any
    if isinstance(rows, np.ndarray):
        numbers = np.ascontiguousarray(rows)
    else:
        import torch

        numbers = rows.contiguous().view(torch.uint8).numpy()
    return memoryview(numbers).cast("B")


def _bits_of(part: Any, hidden: int) -> Bits:
    return np.frombuffer(part, _BITS).reshape(-1, hidden)


def _rows_of(part: Any, dtype: str, hidden: int) -> torch.Tensor:
    import torch

    from smoe.memory.torch_dtypes import TORCH

    numbers = np.frombuffer(part, np.uint8).copy()  # aligned and writable
    return torch.from_numpy(numbers).view(TORCH[dtype]).view(-1, hidden)


def _joined(rows: Sequence[Any]) -> Any:
    if isinstance(rows[0], np.ndarray):
        return np.concatenate(rows)
    import torch

    return torch.cat(list(rows))


def _name_of(rows: torch.Tensor | Bits) -> str:
    return EXPERT_DTYPES[0] if isinstance(rows, np.ndarray) else _name_of_dtype(rows.dtype)


def _name_of_dtype(dtype: torch.dtype) -> str:
    from smoe.memory.torch_dtypes import SAFETENSORS

    return SAFETENSORS[dtype]
