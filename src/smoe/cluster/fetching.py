"""Downloads the files of the coordinator's model to a worker, before it starts work.

    FILES --> (checksums)... MANIFEST: existing files are compared --PIECE, PIECE, ...--> chunks, verified and stored

The worker requests pieces a few MiB ahead. If nothing has arrived for a while, it sends FILES again, because the
coordinator may have restarted and no longer know the worker. Then it requests the missing pieces again. Stored chunks
remain after an interrupt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import zmq

from smoe import __version__
from smoe.cluster import files, frames
from smoe.cluster.dial import dial, refusal, watched
from smoe.cluster.files import CHUNK_BYTES, PIECE_BYTES, Manifest, PiecePosition
from smoe.cluster.frames import Frame, FrameError, FrameKind
from smoe.cluster.identity import Worker
from smoe.cluster.pace import SendRate
from smoe.cluster.received_files import ReceivedFiles
from smoe.errors import ClusterError

_TURN_SECONDS = 0.1
_PATIENCE_SECONDS = 1.0
"""Seconds without a message from the coordinator after which the worker sends FILES again."""
_SILENCE_SECONDS = 3.0
"""Seconds without a message after which the coordinator counts as lost."""
MOST_UNDER_WAY = 32
"""The maximum number of pieces of files that are requested and not yet received. A gigabit link carries so many in a
twentieth of a second."""
MOST_DAMAGED = 3
"""How often the same chunk may arrive damaged before the download ends with an error."""
_PIECES = CHUNK_BYTES // PIECE_BYTES


class Course(NamedTuple):
    """The progress of a download, in bytes."""

    what: str
    """The present phase: `the coordinator sums` (it computes checksums), `checking` (existing files) or `fetching`."""
    done: int
    total: int
    skipped: int = 0
    """The number of bytes of `done` that existed before the download."""


class Coming:
    """A chunk of a file that is being received: at least one of its pieces has been requested."""

    def __init__(self, first: int, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.missing = set(range(first, first + -(-nbytes // PIECE_BYTES)))
        """The pieces of this chunk that have not arrived, by their number in the file."""


class Fetcher:
    """Downloads the coordinator's model files into one folder; `fetch` returns when all files are complete."""

    def __init__(
        self,
        me: Worker,
        folder: Path,
        precision: str,
        rate: float | None = None,
        on_change: Callable[[str], None] = lambda _: None,
        on_course: Callable[[Course], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rate`: the maximum number of bytes per second. `on_change` is called with messages about the connection,
        `on_course` with the progress."""
        self.me = me
        """The worker's identity. After the worker has been admitted, the identity no longer contains the invitation's
        code."""
        self._folder, self._precision = folder, precision
        self._on_change, self._on_course = on_change, on_course
        self._clock, self._pace = clock, SendRate(rate, clock)
        self._sent: Manifest | None = None
        self._received: ReceivedFiles | None = None
        self._coming: dict[tuple[int, int], Coming] = {}
        self._chunks: deque[tuple[int, int]] = deque()
        """The chunks (file, chunk) of which no piece has been requested yet."""
        self._pieces: deque[PiecePosition] = deque()
        """The pieces to request next."""
        self._under_way: set[PiecePosition] = set()
        self._damaged: dict[tuple[int, int], int] = {}
        self._skipped = 0
        self._received_at = self._sent_at = -_SILENCE_SECONDS
        self._is_in = self._is_ending = False

    def end(self) -> None:
        """Make `fetch` return soon; stored chunks remain. Any thread may call this."""
        self._is_ending = True

    @property
    def is_whole(self) -> bool:
        """Whether every file is complete."""
        return self._received is not None and not self._received.missing

    def fetch(self) -> None:
        """Download until all files are complete, or until `end` is called. Raises `ClusterError` if the coordinator
        refuses the worker, sends invalid data, or repeatedly sends damaged data. Raises `DiskSpaceError` or `OSError`
        if files cannot be written."""
        context = zmq.Context()
        try:
            with context.socket(zmq.DEALER) as dealer, watched(dealer, self.me) as check_known:
                dial(dealer, self.me, files.MOST_BYTES)
                while not self._is_ending and not self.is_whole:
                    left = self._pace.left_seconds() if self._sent is not None else _TURN_SECONDS
                    dealer.poll(int(1000 * min(_TURN_SECONDS, left or _TURN_SECONDS)) or 1)
                    self.turn(dealer)
                    check_known()
                if self.is_whole:
                    self._greet(dealer)  # the coordinator may be waiting for this
                dealer.close(linger=500)
        finally:
            context.term()
            self._let_go()

    def _let_go(self) -> None:
        if self._received is not None:
            self._received.close()

    def turn(self, dealer: zmq.Socket[bytes]) -> None:
        """Process received messages, and request missing pieces."""
        while not self.is_whole and dealer.poll(0):
            parts = dealer.recv_multipart(copy=False)
            try:
                self._answer(frames.parse([part.buffer for part in parts]))
            except FrameError as error:
                raise ClusterError(
                    f"the coordinator sent an invalid message, and nothing of that message is stored: {error}"
                ) from error
        now = self._clock()
        if self._is_in and now - self._received_at > _SILENCE_SECONDS:
            self._is_in = False
            self._on_change("lost the coordinator; waiting for it")
        if now - max(self._received_at, self._sent_at) > _PATIENCE_SECONDS:
            if self._greet(dealer):
                self._sent_at = now
        elif self._is_in and self._received is not None:
            self._ask(dealer)

    def _greet(self, dealer: zmq.Socket[bytes]) -> bool:
        """Send FILES. Return whether there is a connection to the coordinator."""
        fields = {
            "smoe": __version__,
            "name": self.me.name,
            "code": self.me.code,
            "precision": self._precision,
            "known": None if self._sent is None else self._sent.mark,
            "missing_bytes": None if self._received is None else self._received.missing_bytes,
        }
        try:
            dealer.send_multipart(frames.talk(FrameKind.FILES, fields), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _answer(self, frame: Frame) -> None:
        if frame.kind is FrameKind.REFUSED:
            raise refusal(self.me, frame)
        if frame.kind not in (FrameKind.SUMMING, FrameKind.MANIFEST, FrameKind.SAME, FrameKind.PIECE):
            return  # a message for workers
        self._received_at = self._clock()
        if frame.kind is FrameKind.PIECE:
            if self._sent is not None:
                self._came(*files.parse_piece(frame, self._sent))
            return
        if not self._is_in:
            self._is_in, self.me = True, replace(self.me, code=None)
            self._on_change("is known to the coordinator")
        if frame.kind is FrameKind.SUMMING:
            fields = frames.fields_of(frame)
            done, total = fields.get("done_bytes"), fields.get("all_bytes")
            if type(done) is int and type(total) is int:
                self._on_course(Course("the coordinator sums", done, total))
        elif frame.kind is FrameKind.MANIFEST:
            sent = files.parse_manifest(frame)
            if self._received is None or self._sent is None or sent.mark != self._sent.mark:
                self._begin(sent)
        self._ask_again()

    def _begin(self, sent: Manifest) -> None:
        """Compare the files that exist in the folder with the coordinator's list, and determine the missing chunks."""
        checked = 0

        def before(nbytes: int) -> None:
            nonlocal checked
            checked = min(checked + nbytes, sent.nbytes)
            self._on_course(Course("checking", checked, sent.nbytes))

        self._let_go()
        self._sent, self._received, self._coming = sent, None, {}
        self._received = ReceivedFiles(self._folder, sent, before)
        self._skipped = sent.nbytes - self._received.missing_bytes
        self._chunks = deque((file, chunk) for file, lacks in self._received.missing.items() for chunk in sorted(lacks))
        self._received_at = self._clock()  # comparing files has taken time
        self._tell()

    def _ask_again(self) -> None:
        """Request all missing pieces again, because the coordinator may have restarted."""
        self._under_way.clear()
        self._pieces = deque(
            PiecePosition(file, piece) for (file, _), each in self._coming.items() for piece in each.missing
        )

    def _ask(self, dealer: zmq.Socket[bytes]) -> None:
        assert self._sent is not None
        while len(self._under_way) < MOST_UNDER_WAY and self._pace.left_seconds() <= 0 and self._has_more():
            place = self._pieces[0]
            try:
                dealer.send_multipart(files.ask(place), zmq.NOBLOCK)
            except zmq.Again:  # the coordinator is not there
                return
            self._pieces.popleft()
            self._under_way.add(place)
            self._pace.book(self._sent.files[place.file].piece_bytes(place.piece))

    def _has_more(self) -> bool:
        """Return whether another piece of the files can be requested. Start the next chunk if all pieces of the present
        one are requested."""
        assert self._sent is not None
        if not self._pieces and self._chunks:
            file, chunk = self._chunks.popleft()
            coming = Coming(chunk * _PIECES, self._sent.files[file].chunk_bytes(chunk))
            self._coming[file, chunk] = coming
            self._pieces.extend(PiecePosition(file, piece) for piece in sorted(coming.missing))
        return bool(self._pieces)

    def _came(self, place: PiecePosition, data: memoryview) -> None:
        """Store a received piece in its chunk. When all pieces of the chunk are there, verify the chunk and write it to
        the file."""
        self._under_way.discard(place)
        file, chunk = place.file, place.piece // _PIECES
        coming = self._coming.get((file, chunk))
        if coming is None or place.piece not in coming.missing:
            return  # a duplicate
        begin = place.piece % _PIECES * PIECE_BYTES
        coming.data[begin : begin + len(data)] = data
        coming.missing.discard(place.piece)
        if not coming.missing:
            del self._coming[file, chunk]
            self._landed(file, chunk, coming.data)

    def _landed(self, file: int, chunk: int, data: bytearray) -> None:
        assert self._received is not None and self._sent is not None
        before = self._received.missing[file]
        if not self._received.keep(file, chunk, data):
            self._damaged[file, chunk] = times = self._damaged.get((file, chunk), 0) + 1
            if times >= MOST_DAMAGED:
                raise ClusterError(
                    f"chunk {chunk} of {self._sent.files[file].name} arrived damaged {times} times: the coordinator's "
                    "file has changed since its checksums were made, or the network changes it; check the "
                    "coordinator's file"
                )
            self._chunks.appendleft((file, chunk))
        elif self._received.missing.get(file, before) is not before:  # the disk returned other bytes than were written
            for lost in self._received.missing[file]:
                self._damaged[file, lost] = self._damaged.get((file, lost), 0) + 1
                if self._damaged[file, lost] >= MOST_DAMAGED:
                    raise ClusterError(
                        f"the folder {self._folder} returns other bytes than were written to it, so its disk is "
                        "unreliable; give a folder on another disk (`fetch`)"
                    )
                self._chunks.append((file, lost))
        self._received_at = self._clock()
        self._tell()

    def _tell(self) -> None:
        assert self._received is not None and self._sent is not None
        done = self._sent.nbytes - self._received.missing_bytes
        self._on_course(Course("fetching", done, self._sent.nbytes, self._skipped))
