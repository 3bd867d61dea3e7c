"""What main and workers say to each other: fixed binary frames, one ZeroMQ message of a few parts each.

    header (20 bytes)    "SMOE" | version u8 | kind u8 | dtype u8 | - | request u64 | rows u32
    talk                 header | JSON object                          HELLO, WELCOME, REFUSED
    work                 header | asks u32 [n, 3] | tokens u32 [t] | hidden [rows, H]
    done                 header | times f64 [4] | rows [sum, H]
    failed               header | text
    fetch                header | experts u32 [n, 2]
    beat, leave          header
    files and pieces     as `files.py` says
    experts              header | JSON object | table [65536]        DESCRIBE asks for it: `described.py`
    a shadow's           as `shadow_frames.py` says

Nothing is unpickled or evaluated. Lengths are checked against each other before memory is allocated; a sender of
what does not fit is believed no more.
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

VERSION = 2
MOST_BYTES = 1 << 30
"""The size limit of a part of a message for every model; a longer one is not received."""
_MOST_TALK = 1 << 16
_OVERHEAD = 1 << 10
"""What encryption adds to a part, and more."""
_ASK_BYTES = 16
"""A row of a request in its tables: an expert has at least one."""
_HEADER = struct.Struct("<4sBBBxQI")
_MAGIC = b"SMOE"
_WHOLE = np.dtype("<u4")
_BITS = np.dtype("<u2")
"""bf16 numbers as the bits that they are: rows where there is no torch."""


class FrameKind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """A worker says what it is and has."""
    WELCOME = 2
    """It belongs to the cluster now, or is asked for a proof first."""
    REFUSED = 3
    """It does not, and why."""
    WORK = 4
    """Compute experts for these rows."""
    DONE = 5
    """What they gave."""
    FAILED = 6
    """The request could not be served."""
    FETCH = 7
    """Have these experts in memory soon."""
    BEAT = 8
    """The worker is alive; from main: say so."""
    LEAVE = 9
    """The sender goes."""
    FILES = 10
    """A worker has not got all files of the model: what is there of them?"""
    MANIFEST = 11
    """Names, sizes and checksums of the files."""
    SUMMING = 12
    """Main still makes the checksums."""
    SAME = 13
    """The manifest is the one that the worker has."""
    PIECE = 14
    """A worker asks for a piece of a file; main sends it."""
    DESCRIBE = 15
    """A worker without torch asks what experts are."""
    EXPERTS = 16
    """What they are."""
    SHADOW = 17
    """A shadow says what it is and has."""
    FOLLOW = 18
    """Main decodes this token; or nothing that a shadow follows."""
    KEYS = 19
    """Keys and values of some positions."""
    TAKEN = 20
    """They have come."""
    EXPECTED = 21
    """Experts that a shadow's routers have chosen."""


class FrameError(Exception):
    """A message that is none of ours, or contradicts itself."""


class RowFormat(NamedTuple):
    """What goes to workers, hidden states, and comes back, outputs of experts."""

    numbers: int
    """Numbers in a row (H)."""
    dtype: Any
    """torch's; without it, numpy's of the bits."""
    most: int
    """Rows of one request, in either direction."""

    @property
    def part_bytes(self) -> int:
        """The longest part of any message for this model; a longer one is not received."""
        row_bytes: int = max(self.numbers * self.dtype.itemsize, _ASK_BYTES)
        return min(MOST_BYTES, max(_MOST_TALK, self.most * row_bytes) + _OVERHEAD)

    @property
    def fitting(self) -> RowFormat:
        """The same format with at most as many rows as fit a message."""
        row_bytes: int = max(self.numbers * self.dtype.itemsize, _ASK_BYTES)
        return self._replace(most=min(self.most, (MOST_BYTES - _OVERHEAD) // row_bytes))


class Frame(NamedTuple):
    """Any message, its parts not looked at."""

    kind: FrameKind
    request: int
    rows: int
    dtype: str
    """The dtype's name in safetensors."""
    body: Sequence[Any]
    """The parts after the header: `bytes` or memory views."""


class WorkFrame(NamedTuple):
    """Experts and the rows that go through them."""

    wanted: Sequence[ExpertTask]
    hidden: torch.Tensor | Bits
    """[rows, H]"""


class Times(NamedTuple):
    """What a request took at the worker, in seconds."""

    whole: float
    """Seconds from its arrival, or the end of the request before it, to its last result."""
    computing: float
    """The part of them that was arithmetic."""
    loading: float = 0.0
    """Experts loaded for it, partly while others were computed, so the request may have waited less."""
    loads: int = 0
    """How many these were."""


class DoneFrame(NamedTuple):
    """What a worker has computed."""

    times: Times
    rows: torch.Tensor
    """[n, H], expert after expert in the order asked for."""


def parse(parts: Sequence[Any]) -> Frame:
    """A message as it came; raises `FrameError`."""
    if not parts or len(parts) > 4 or len(memoryview(parts[0])) != _HEADER.size:
        raise FrameError("no header")
    magic, version, kind, dtype, request, rows = _HEADER.unpack(bytes(parts[0]))
    if magic != _MAGIC or version != VERSION:
        raise FrameError(f"magic {magic!r}, version {version}")
    if kind not in set(FrameKind) or dtype >= len(EXPERT_DTYPES):
        raise FrameError(f"kind {kind}, dtype {dtype}")
    return Frame(FrameKind(kind), request, rows, EXPERT_DTYPES[dtype], parts[1:])


def talk(kind: FrameKind, fields_of: dict[str, Any], request: int = 0) -> list[Any]:
    """A message of words."""
    return [_header(kind, request), json.dumps(fields_of).encode()]


def fields_of(frame: Frame) -> dict[str, Any]:
    """The words of a message; raises `FrameError`."""
    if len(frame.body) != 1 or len(memoryview(frame.body[0])) > _MOST_TALK:
        raise FrameError("not a text message")
    try:
        found = json.loads(bytes(frame.body[0]))
    except (ValueError, RecursionError) as error:
        raise FrameError("not JSON") from error
    if not isinstance(found, dict):
        raise FrameError("not a JSON object")
    return found


def work(request: int, wanted: Sequence[ExpertTask], hidden: torch.Tensor) -> list[Any]:
    """`hidden` [rows, H] once, whatever the number of experts."""
    asks = np.array([(layer, expert, len(tokens)) for (layer, expert, _), tokens in wanted], _WHOLE)
    tokens = np.concatenate([np.asarray(each.tokens, _WHOLE) for each in wanted])
    return [
        _header(FrameKind.WORK, request, hidden.shape[0], _name_of(hidden)),
        asks.tobytes(),
        tokens.tobytes(),
        _bytes_of(hidden),
    ]


def parse_work(frame: Frame, experts: Mapping[int, int], hidden: int, as_bits: bool = False) -> WorkFrame:
    """Parse the WORK of a model whose layers have so many `experts`, and rows of so many numbers, which are to come as
    `Bits` where there is no torch; raises `FrameError`."""
    asks_part, tokens_part, rows_part = _parts(frame, 3)
    asks, tokens = _whole_numbers(asks_part, 3), _whole_numbers(tokens_part, 1)[:, 0]
    if len(memoryview(rows_part)) != frame.rows * hidden * ITEM_BYTES[frame.dtype]:
        raise FrameError("rows of the wrong size")
    if not len(asks) or int(asks[:, 2].sum()) != len(tokens) or (len(tokens) and int(tokens.max()) >= frame.rows):
        raise FrameError("token numbers out of range")
    wanted, begin = [], 0
    for layer, expert, count in asks.tolist():
        if expert >= experts.get(layer, 0) or not count:
            raise FrameError(f"no expert {expert} of layer {layer}")
        wanted.append(ExpertTask((layer, expert, EXACT), tokens[begin : begin + count].tolist()))
        begin += count
    if as_bits and frame.dtype != "BF16":
        raise FrameError(f"rows in {frame.dtype}")
    return WorkFrame(wanted, _bits_of(rows_part, hidden) if as_bits else _rows_of(rows_part, frame.dtype, hidden))


def done(request: int, times: Times, rows: Sequence[torch.Tensor] | Sequence[Bits]) -> list[Any]:
    """`rows`: [n, H] of every expert asked for, in order."""
    together = _joined(rows)
    header = _header(FrameKind.DONE, request, together.shape[0], _name_of(together))
    return [header, np.array(times, np.float64).tobytes(), _bytes_of(together)]


def parse_done(frame: Frame, rows: int, hidden: int, dtype: torch.dtype) -> DoneFrame:
    """The answer to a request for so many rows; raises `FrameError`."""
    times_part, rows_part = _parts(frame, 2)
    if frame.rows != rows or frame.dtype != _name_of_dtype(dtype) or len(memoryview(times_part)) != 32:
        raise FrameError("results of the wrong shape")
    if len(memoryview(rows_part)) != rows * hidden * dtype.itemsize:
        raise FrameError("rows of the wrong size")
    whole, computing, loading, loads = np.frombuffer(times_part, np.float64).tolist()
    if not (0 <= computing <= whole < 1e6 and 0 <= loading < 1e6 and 0 <= loads <= rows):  # NaN too
        raise FrameError("impossible times")
    return DoneFrame(Times(whole, computing, loading, int(loads)), _rows_of(rows_part, frame.dtype, hidden))


def fetch(keys: Sequence[ExpertKey]) -> list[Any]:
    """Ask for experts to be brought into memory."""
    return [_header(FrameKind.FETCH, 0), np.array([key[:2] for key in keys], _WHOLE).tobytes()]


def parse_fetch(frame: Frame, experts: Mapping[int, int]) -> list[ExpertKey]:
    """The experts asked for; raises `FrameError` where there is no such one."""
    (part,) = _parts(frame, 1)
    found = _whole_numbers(part, 2).tolist()
    if any(expert >= experts.get(layer, 0) for layer, expert in found):
        raise FrameError("expert numbers out of range")
    return [(layer, expert, EXACT) for layer, expert in found]


def alone(kind: FrameKind, request: int = 0) -> list[Any]:
    """A message without a body."""
    return [_header(kind, request)]


def failed(request: int, why: str) -> list[Any]:
    """A request could not be served."""
    return [_header(FrameKind.FAILED, request), why.encode()[:_MOST_TALK]]


def text_of(frame: Frame) -> str:
    """The words of a failure, as far as they are printable."""
    (part,) = _parts(frame, 1)
    return "".join(c for c in bytes(part)[:2000].decode("utf8", "replace") if c.isprintable())


def _header(kind: FrameKind, request: int, rows: int = 0, dtype: str = EXPERT_DTYPES[0]) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, kind, EXPERT_DTYPES.index(dtype), request, rows)


def _parts(frame: Frame, count: int) -> Sequence[Any]:
    if len(frame.body) != count:
        raise FrameError(f"wrong number of parts: {len(frame.body)}")
    return frame.body


def _whole_numbers(part: Any, columns: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    if len(memoryview(part)) % (4 * columns):
        raise FrameError("a truncated table")
    return np.frombuffer(part, _WHOLE).reshape(-1, columns)


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

    numbers = np.frombuffer(part, np.uint8).copy()  # aligned, and ours to write
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
