"""Traces on disk: they are written row by row, and memory-mapped for reading. `docs/traces.md` describes the layout.

    offset 0    8 bytes magic, format version (4 bytes), length of the JSON text (4), number of rows (8)
    then        JSON text, zeros up to the next page
    then        the rows

A file gets its name only when it is complete. The number of rows is written last, and is a special value ("unfinished")
before. So neither an interrupted recording nor a truncated copy is taken for a trace.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from smoe.errors import ConfigError, DiskSpaceError, TraceError
from smoe.policy.importance import scaled
from smoe.routing import Phase, Routing, last_rows
from smoe.trace.record import PHASES, TracedLayer, TraceHeader
from smoe.units import format_bytes
from smoe.whole_file import partial_of, take_place

if TYPE_CHECKING:
    from smoe.models.scoring import ScoringRule

MAGIC = b"smoetrac"
VERSION = 1
_HEAD = struct.Struct("<8sIIQ")
_COUNT_OFFSET = 16
_UNFINISHED = 2**64 - 1
_PAGE = 4096


def refuse_existing(path: Path) -> None:
    """Raise `ConfigError` if the file exists."""
    if path.exists():
        raise ConfigError(
            f"{path} exists already; choose another `out`, or replace it with `force`",
            setting="out",
            given=str(path),
            allowed="a file that is not there yet, or any with `force`",
        )


class TraceWriter:
    """Writes a trace to `path`, row by row. Used as a context manager, it leaves a complete file, or no file after an
    error.

    Raise `ConfigError` if the file exists and `replace` is false, `DiskSpaceError` if the disk is full, and
    `TraceError` for other errors of writing.
    """

    def __init__(self, path: Path, header: TraceHeader, *, replace: bool = False) -> None:
        if not replace:
            refuse_existing(path)
        text = json.dumps(header.as_json()).encode()
        self.header = header
        self.count = 0
        """The number of rows that belong to complete steps."""
        self._pending = 0
        """The number of rows that belong to a step that has not ended and may still fail."""
        self._path = path
        self._partial = partial_of(path)
        self._start = _page_ceil(_HEAD.size + len(text))
        with self._writing():
            self._file = self._partial.open("wb")
        try:
            self._begin(text)
        except BaseException:
            self.abandon()
            raise

    def _begin(self, text: bytes) -> None:
        with self._writing():
            self._file.write((_HEAD.pack(MAGIC, VERSION, len(text), _UNFINISHED) + text).ljust(self._start, b"\0"))

    @property
    def nbytes(self) -> int:
        """The size of the file so far, in bytes."""
        return self._start + (self.count + self._pending) * self.header.row.itemsize

    def append(self, rows: np.ndarray) -> None:
        """Append rows that belong to a step that has not ended. `rows`: [n] of the type `header.row`."""
        with self._writing():
            self._file.write(rows.tobytes())
        self._pending += len(rows)

    def keep(self) -> None:
        """Add the rows of the current step to the trace, because the step has ended."""
        self.count, self._pending = self.count + self._pending, 0

    def drop(self) -> None:
        """Remove the rows of the current step from the trace, because the step has failed."""
        if self._pending:
            self._pending = 0
            with self._writing():
                self._file.seek(self.nbytes)
                self._file.truncate()

    def finish(self) -> None:
        """Write the number of rows and give the file its name, which completes the trace. Rows of a step that has not
        ended are removed."""
        self.drop()
        with self._writing():
            self._file.seek(_COUNT_OFFSET)
            self._file.write(struct.pack("<Q", self.count))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            take_place(self._partial, self._path)

    def abandon(self) -> None:
        """Delete the unfinished trace file."""
        with suppress(OSError):  # closing may fail on a full disk; the file is deleted anyway
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abandon()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskSpaceError(
                    f"the disk of {self._path} was full after {format_bytes(self.nbytes)} of the trace had been "
                    "written, and the incomplete trace was deleted; free some disk space, give another `out`, or "
                    "record fewer tokens",
                    setting="out",
                    given=str(self._path),
                    allowed="a file on a disk with more room",
                ) from error
            message = f"cannot write {self._path}: {error.strerror or error}; give another `out`"
            raise TraceError(
                message, setting="out", given=str(self._path), allowed="a file in a folder that can be written"
            ) from error


class Trace:
    """A trace on disk. `rows` is memory-mapped, so only rows that are used are read.

    Raise `TraceError` if the file is not a trace, has another version, or is incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header, start, count = _read_header(path)
        row, size = self.header.row, path.stat().st_size
        if size != start + count * row.itemsize:
            whole = start + count * row.itemsize
            message = f"{path} is truncated or damaged: {size} bytes, its header says {whole}; copy or record it again"
            raise _no_trace(message, path)
        self.rows: np.ndarray = np.memmap(path, row, "r", start, (count,)) if count else np.zeros(0, row)
        """[number of rows] of the type `TraceHeader.row`, in the order in which the routers ran."""

    def of_layer(self, layer: TracedLayer, tokens: int | None = None) -> np.ndarray:
        """Return the rows [T] of one layer, without padding. `tokens`: only the first so many rows; None: all rows."""
        places = np.flatnonzero(self.rows["layer"] == layer.layer)
        chosen = self.rows["top_k_index"][places, 0] < layer.experts
        found: np.ndarray = self.rows[places[chosen][:tokens]]
        return found

    def routings(self, *, with_scores: bool = False, with_weights: bool = False) -> Sequence[Routing]:
        """Return the trace in the simulator's form: one `Routing` for each layer and step, which is made when it is
        accessed.

        `with_scores`: add choice scores. They are computed from the logits by each router's rule, as in the engine,
        which imports torch. `with_weights`: add routing weights, with every row scaled to sum 1. Raise `TraceError` if
        the rule of a router is unknown.
        """
        return _Routings(self, _rules(self) if with_scores else {}, with_weights)


class _Routings(Sequence[Routing]):
    """A sequence of the routings of a trace. Each routing is made from consecutive rows with the same step and
    layer."""

    def __init__(self, trace: Trace, rules: dict[int, ScoringRule], with_weights: bool) -> None:
        self._rows, self._rules, self._with_weights = trace.rows, rules, with_weights
        self._layers = {layer.layer: layer for layer in trace.header.layers}
        step, layer = self._rows["step"], self._rows["layer"]
        changes = np.flatnonzero((step[1:] != step[:-1]) | (layer[1:] != layer[:-1])) + 1
        self._bounds = np.concatenate([[0], changes, [len(step)]]) if len(step) else np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, place: int) -> Routing: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Routing]: ...
    def __getitem__(self, place: int | slice) -> Routing | Sequence[Routing]:
        numbers = range(len(self))[place]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        rows = self._rows[self._bounds[numbers] : self._bounds[numbers + 1]]
        layer, phase = self._layers[int(rows["layer"][0])], PHASES[rows["phase"][0]]
        index: list[list[int]] = rows["top_k_index"][:, : layer.top_k].tolist()
        sequences = int(rows["sequence"][-1]) - int(rows["sequence"][0]) + 1
        routing = Routing(layer.layer, phase, layer.experts, index, None, sequences)
        if self._with_weights:
            routing = routing._replace(weights=scaled(rows["top_k_weights"][:, : layer.top_k].tolist()))
        return routing._replace(scores=self._scores(layer, routing, rows["router_logits"]))

    def _scores(self, layer: TracedLayer, routing: Routing, logits: np.ndarray) -> list[list[float]] | None:
        """Return the choice scores of one routing. Of a prefill, only its last tokens have scores, as in the engine."""
        rule = self._rules.get(layer.layer)
        if rule is None:
            return None
        import torch

        last = logits[last_rows(routing)] if routing.phase is Phase.PREFILL else logits
        scores = rule.scores(torch.from_numpy(last[:, : layer.experts].copy()))
        found: list[list[float]] = rule.choice(scores).tolist()
        return found


def _rules(trace: Trace) -> dict[int, ScoringRule]:
    from smoe.models.scoring import ScoringRule

    rules = {}
    for layer in trace.header.layers:
        if layer.rule is None:
            raise TraceError(
                f"{trace.path} has logits but no scores: the router of layer {layer.layer} "
                f"({trace.header.model_type}) follows no rule that smoe knows; replay the trace without `alpha`, and "
                "with an eviction other than score"
            )
        rules[layer.layer] = ScoringRule.from_json(layer.rule)
    return rules


def _read_header(path: Path) -> tuple[TraceHeader, int, int]:
    """Return (header, offset of the rows in bytes, number of rows)."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or head[:8] != MAGIC:
                raise _no_trace(f"{path} is not a routing trace; smoe record writes one", path)
            _, version, length, count = _HEAD.unpack(head)
            text = file.read(length)
    except OSError as error:
        why = "it is a folder" if path.is_dir() else error.strerror or error
        raise _no_trace(f"cannot read {path}: {why}; give a file that smoe record has written", path) from error
    if version != VERSION:
        message = f"{path} is a trace of format {version}, this smoe reads format {VERSION}; record it again"
        raise _no_trace(message, path)
    if count == _UNFINISHED:
        raise _no_trace(f"{path} was never finished: its recording was interrupted; record it again", path)
    try:
        header: Any = json.loads(text)
        return TraceHeader.from_json(header), _page_ceil(_HEAD.size + length), count
    except (ValueError, KeyError, TypeError) as error:
        raise _no_trace(f"the header of {path} is damaged ({error}); copy or record it again", path) from error


def _no_trace(message: str, path: Path) -> TraceError:
    return TraceError(message, setting="trace", given=str(path), allowed="a file that smoe record has written")


def _page_ceil(count: int) -> int:
    return -(-count // _PAGE) * _PAGE
