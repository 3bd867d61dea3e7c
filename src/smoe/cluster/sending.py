"""Sends the coordinator's model files to workers, while the coordinator has no requests for experts in flight.

    link's thread    receive: requests for pieces   turn: if no thread waits for an expert, send one piece
    courier's own    checksums, made once | reads the next piece, at the allowed rate, and wakes the link's thread

While experts are requested, one piece is sent in each gap between two requests: more bytes in the system's buffers
would delay the next request. A worker that sends FILES starts again; its earlier requests are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from smoe import __version__
from smoe.cluster import files, frames
from smoe.cluster.files import Manifest, PiecePosition, SentFile
from smoe.cluster.frames import Frame, FrameError, FrameKind
from smoe.cluster.pace import SendRate
from smoe.cluster.sums import forget_sums, identity, sums_of
from smoe.errors import CheckpointError, SmoeError
from smoe.memory.expert_files import FileIdentity, check_identity

FILE_KINDS = (FrameKind.FILES, FrameKind.PIECE)
"""The kinds of messages to a courier."""
CALM_SECONDS = 0.2
"""Seconds without a request after which the coordinator counts as idle."""
_MOST_ASKED = 64
"""The maximum number of pieces that a worker may have requested; further requests are ignored."""
_MOST_READY = 2
"""The maximum number of pieces that are read before they can be sent."""

_log = logging.getLogger(__name__)

Send = Callable[[bytes, list[Any]], bool]


class _EndedError(Exception):
    """Raised to end the thread that reads the files."""


@dataclass
class Asker:
    """A worker that downloads files, and the pieces of files that it has requested."""

    route: bytes
    wanted: deque[PiecePosition] = field(default_factory=deque)


class SummedFiles(NamedTuple):
    """The files with their checksums and identities."""

    manifest: Manifest
    paths: tuple[Path, ...]
    identities: tuple[FileIdentity, ...]


class Courier:
    """Sends the coordinator's model files to workers. The thread that owns the sockets calls `receive` and `turn`;
    `close` ends the thread that reads the files."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        precision: str,
        admitted: Callable[[str, dict[str, Any]], str],
        rate: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        """`paths`: the files by their transfer names; `precision`: the model's precision. `admitted` returns the reason
        why a machine with this key and these fields is refused; an empty text if it is admitted. `rate`: the maximum
        number of bytes per second, for all workers together."""
        self.missing: dict[str, int] = {}
        """The bytes that workers reported as missing, by key."""
        self.summed_bytes = 0
        self._paths, self._precision, self._admitted = dict(paths), precision, admitted
        self._pace, self._clock = SendRate(rate, clock), clock
        self._is_ending = False
        self._quiet, self._ended = threading.Event(), threading.Event()
        self._sleep = sleep or self._ended.wait
        self._changed = threading.Condition()
        self._askers: OrderedDict[str, Asker] = OrderedDict()
        self._ready: deque[tuple[bytes, list[Any]]] = deque()
        self._known: SummedFiles | None = None
        self._failure = ""
        self._busy = -CALM_SECONDS
        """The time (`time.monotonic`) at which a thread last waited for an expert."""
        self._has_sent = False
        """Whether a piece was sent in the present gap between two requests for experts."""
        self._ring: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="smoe-courier", daemon=True)

    def begin(self, ring: Callable[[], None]) -> None:
        """Start the thread that reads the files. `ring` makes the sockets' thread call `turn` soon; any thread may call
        `ring`."""
        self._ring = ring
        self._thread.start()

    def close(self) -> None:
        """End the thread. Repeated calls have no effect."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._ended.set()
        self._quiet.set()
        if self._thread.ident is not None:
            self._thread.join()

    # -- the sockets' thread ------------------------------------------------------------------------------------------

    def receive(self, route: bytes, key: str, frame: Frame, send: Send) -> None:
        """Process a message of one of the kinds `FILE_KINDS`. Raises `FrameError` for an invalid message."""
        if frame.kind is FrameKind.FILES:
            self._greeted(route, key, frames.fields_of(frame), send)
            return
        asker, known = self._askers.get(key), self._known
        if asker is None or asker.route != route or known is None:
            return  # not admitted, or its manifest is out of date: it will send FILES
        if frame.body:
            raise FrameError("a piece from a worker")
        place = files.parse_place(frame, known.manifest)
        with self._changed:
            if len(asker.wanted) < _MOST_ASKED:
                asker.wanted.append(place)
            self._changed.notify_all()

    def _greeted(self, route: bytes, key: str, fields: dict[str, Any], send: Send) -> None:
        why = self._refusal(key, fields)
        if why:
            send(route, frames.talk(FrameKind.REFUSED, {"why": why}))
            return
        with self._changed:
            self._askers[key] = Asker(route)
            known, failure = self._known, self._failure
            self._failure = ""  # reported once; the next worker gets another try
            self._changed.notify_all()
        if failure:
            send(route, frames.talk(FrameKind.REFUSED, {"why": failure}))
        elif known is None:
            total = sum(path.stat().st_size for path in self._paths.values() if path.exists())
            send(route, frames.talk(FrameKind.SUMMING, {"done_bytes": self.summed_bytes, "all_bytes": total}))
        elif fields.get("known") == known.manifest.mark:
            missing = fields.get("missing_bytes")
            if type(missing) is int and 0 <= missing <= known.manifest.nbytes:
                self.missing[key] = missing
            send(route, frames.alone(FrameKind.SAME))
        else:
            send(route, files.manifest(known.manifest))

    def _refusal(self, key: str, fields: dict[str, Any]) -> str:
        for what, mine in {"smoe": __version__, "precision": self._precision}.items():
            if fields.get(what) != mine:
                return f"its {what} is {str(fields.get(what))[:80]!r}, the coordinator has {mine!r}"
        return self._admitted(key, fields)

    def turn(self, is_quiet: bool, send: Send) -> None:
        """Send the next piece of a model file, if the network is not needed for requests. `is_quiet`: whether no thread
        waits for an expert; otherwise nothing is sent. Until `CALM_SECONDS` after the last request, only one piece is
        sent in each gap between two requests."""
        now = self._clock()
        if not is_quiet:
            self._quiet.clear()
            self._busy, self._has_sent = now, False
            return
        self._quiet.set()
        if self._has_sent and now - self._busy < CALM_SECONDS:
            return
        with self._changed:
            if not self._ready:
                return
            route, parts = self._ready.popleft()
            is_more = bool(self._ready)
            self._changed.notify_all()
        self._has_sent = True
        send(route, parts)
        if is_more:
            self._ring()

    # -- the courier's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                self._step()
            except _EndedError:
                return
            except (OSError, SmoeError) as error:
                _log.warning("files cannot be sent: %s", error)
                with self._changed:
                    self._known, self._failure = None, f"it cannot read the model's files ({error})"
                    self._askers.clear()
                    self._ready.clear()

    def _step(self) -> None:
        with self._changed:
            self._changed.wait_for(self._has_something_to_do)
            if self._is_ending:
                raise _EndedError
            known = self._known
            key = next((key for key, asker in self._askers.items() if asker.wanted), "")
            if key:
                self._askers.move_to_end(key)  # workers in turn
                asker = self._askers[key]
                place, route = asker.wanted.popleft(), asker.route
        if known is None:
            known = self._summed()
            with self._changed:
                self._known = known
                self._ready.extend((asker.route, files.manifest(known.manifest)) for asker in self._askers.values())
            self._ring()
        elif key:
            self._fetch(known, route, place)

    def _has_something_to_do(self) -> bool:
        if self._is_ending or (self._askers and self._known is None):
            return True
        return len(self._ready) < _MOST_READY and any(asker.wanted for asker in self._askers.values())

    def _fetch(self, known: SummedFiles, route: bytes, place: PiecePosition) -> None:
        """Read one piece of a file as soon as the allowed rate permits it, and queue the piece for sending."""
        while (left := self._pace.left_seconds()) > 0 and not self._is_ending:
            self._sleep(left)
        sent = known.manifest.files[place.file]
        nbytes = sent.piece_bytes(place.piece)
        self._pace.book(nbytes)
        path = known.paths[place.file]
        with path.open("rb") as file:
            check_identity(path, file.fileno(), known.identities[place.file])
            file.seek(place.piece * files.PIECE_BYTES)
            data = file.read(nbytes)
        with self._changed:
            self._ready.append((route, files.piece(place, data)))
        self._ring()

    def _summed(self) -> SummedFiles:
        """Return the manifest, with checksums of all files. Raises `CheckpointError` if a file changes during this."""
        self.summed_bytes = 0
        made, identities = list[SentFile](), list[FileIdentity]()
        for name, path in self._paths.items():
            if not files.is_file_name(name):
                raise CheckpointError(
                    f"{path} has a name that cannot be sent; rename it with letters, digits, '.', '_' and '-'"
                )
            before = self.summed_bytes
            identities.append(identity(path))
            made.append(sums_of(path, name, self._may_read))
            if identity(path) != identities[-1]:
                forget_sums(path)
                raise CheckpointError(f"{path} is being written")
            self.summed_bytes = before + made[-1].nbytes
        return SummedFiles(Manifest(made), tuple(self._paths.values()), tuple(identities))

    def _may_read(self, nbytes: int) -> None:
        """Wait until no thread waits for an expert: reading and hashing would take the disk and a core from it."""
        self._quiet.wait()
        if self._is_ending:
            raise _EndedError
        self.summed_bytes += nbytes
