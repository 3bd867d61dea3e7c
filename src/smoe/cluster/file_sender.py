"""A coordinator that only sends a model's files (`smoe cluster send`), until all workers of the cluster have them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq

from smoe.cluster import frames
from smoe.cluster.address import to_listen_at
from smoe.cluster.admission import Admission
from smoe.cluster.frames import FrameError
from smoe.cluster.identity import Coordinator
from smoe.cluster.listening_sockets import ListeningSockets, user_of
from smoe.cluster.pollable_queue import PollableQueue
from smoe.cluster.sending import FILE_KINDS, Courier

_TURN_SECONDS = 0.1
_MOST_BYTES = 1 << 16
"""The size limit of a message part in bytes: workers send texts and piece numbers only."""
_log = logging.getLogger(__name__)


class FileSender(Admission):
    """Sends a model's files to workers, and ignores all other messages. A worker that wants to compute repeats its
    HELLO until a coordinator that computes answers."""

    def __init__(
        self,
        coordinator: Coordinator,
        paths: Mapping[str, Path],
        precision: str,
        rate: float | None = None,
        on_whole: Callable[[str], None] = lambda _: None,
    ) -> None:
        """The arguments are those of `Courier`; `on_whole` is called with the name of each worker that has received all
        files."""
        super().__init__(coordinator)
        self.courier = Courier(paths, precision, self.admitted, rate)
        self._on_whole = on_whole
        self._whole: set[str] = set()
        self._queue: PollableQueue[None] = PollableQueue()
        self._is_ending = False

    def end(self) -> None:
        """Make `serve` return. Any thread may call this method."""
        self._is_ending = True
        self._queue.put(None)

    def serve(self) -> None:
        """Send files until `end` is called, or until all workers of the cluster have all files and no invitation is
        valid. Raises `ClusterError` if the address is not available."""
        keys = self.coordinator.keys
        try:
            at = to_listen_at(self.coordinator.address, self.coordinator.everywhere)
            sockets = ListeningSockets(at, keys.public, keys.secret, self, _MOST_BYTES)
            try:
                self._run(sockets)
            finally:
                self.courier.close()
                sockets.close()
        finally:
            self._queue.close()

    def _run(self, sockets: ListeningSockets) -> None:
        self.courier.begin(lambda: self._queue.put(None))
        poller = zmq.Poller()
        for each in (sockets.router, sockets.monitor, self._queue.fileno()):
            poller.register(each, zmq.POLLIN)
        while not self._is_ending and not self._is_done():
            poller.poll(int(1000 * _TURN_SECONDS))
            self._turn(sockets)

    def _turn(self, sockets: ListeningSockets) -> None:
        router = sockets.router

        def send(route: bytes, parts: list[Any]) -> bool:
            try:
                router.send_multipart([route, *parts], zmq.NOBLOCK, copy=False)
            except zmq.ZMQError as error:  # it has disconnected and will send FILES again
                _log.info("cannot reach %r: %s", route, error)
                return False
            return True

        self._queue.take()
        while sockets.monitor.poll(0):
            sockets.monitor.recv_multipart()  # disconnected workers will send FILES again
        while router.poll(0):
            parts = router.recv_multipart(copy=False)
            try:
                frame = frames.parse([part.buffer for part in parts[1:]])
                if frame.kind in FILE_KINDS:
                    self.courier.receive(parts[0].bytes, user_of(parts[-1]), frame, send)
            except FrameError as error:
                _log.warning("a worker sent an invalid message: %s", error)
        self.courier.turn(True, send)

    def _is_done(self) -> bool:
        """Return whether all workers have all files, and no invitation is valid with which another worker could
        join."""
        for key in [key for key, missing in self.courier.missing.items() if missing == 0 and key not in self._whole]:
            self._whole.add(key)
            self._on_whole(self.name_of(key) or "?")
        known = set(self.coordinator.workers.values())
        return bool(known) and known <= self._whole and not self.coordinator.expects_someone()
