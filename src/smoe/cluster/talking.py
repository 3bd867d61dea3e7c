"""The talking thread of a machine that belongs to a main's cluster, worker or shadow.

    connected --greeting until answered--> in: beats --coordinator silent for a while--> greeting again

Whatever else the machine does has threads of its own, which ring when they have something to send.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from smoe.cluster import frames
from smoe.cluster.dial import dial, watched
from smoe.cluster.frames import Frame, FrameError, FrameKind
from smoe.cluster.identity import Worker
from smoe.cluster.pollable_queue import PollableQueue

BEAT_SECONDS = 0.1
_HELLO_SECONDS = 0.5
_SILENCE_SECONDS = 3.0
"""Without a word from main after which it is taken to have gone."""

_log = logging.getLogger(__name__)


class Talking(ABC):
    """Greets main, hears what it says, and says what was put into `_queue`."""

    def __init__(self, me: Worker, on_change: Callable[[str], None]) -> None:
        """`on_change` hears, in words, when it is let in, or main is gone."""
        self._me = me
        self._on_change = on_change
        self._queue: PollableQueue[list[Any]] = PollableQueue()
        self._received_at = self._sent_at = 0.0
        self._is_in = False
        self.is_ending = False
        """Whether it was asked to end."""

    def end(self) -> None:
        """End `serve`; from any thread."""
        self.is_ending = True
        self._queue.put([])

    def serve(self) -> None:
        """Run until `end`. Raises `WorkerRefusedError` where the coordinator refuses this machine."""
        context = zmq.Context()
        try:
            with context.socket(zmq.DEALER) as dealer, watched(dealer, self._me) as check_known:
                self._connect(dealer)
                poller = zmq.Poller()
                poller.register(dealer, zmq.POLLIN)
                poller.register(self._queue.fileno(), zmq.POLLIN)
                while not self.is_ending:
                    poller.poll(int(1000 * BEAT_SECONDS))
                    self._turn(dealer)
                    if not self._is_in:
                        check_known()
                self._send(dealer, frames.alone(FrameKind.LEAVE))
                dealer.close(linger=200)
        finally:
            context.term()
            self._over()
            self._queue.close()

    @property
    @abstractmethod
    def _part_bytes(self) -> int:
        """The longest part of a message that is received."""

    @abstractmethod
    def _greeting(self) -> list[Any]:
        """The greeting, sent until the coordinator answers."""

    @abstractmethod
    def _answer(self, dealer: zmq.Socket[bytes], frame: Frame) -> None:
        """Do what main says. Raises `FrameError`, and `ClusterError` where we are to end."""

    @abstractmethod
    def _over(self) -> None:
        """End what else there is."""

    def _lost(self) -> None:
        """Main has gone."""

    def _connect(self, dealer: zmq.Socket[bytes]) -> None:
        self._address = dial(dealer, self._me, self._part_bytes)

    def _turn(self, dealer: zmq.Socket[bytes]) -> None:
        """Hear what there is to hear, say what there is to say."""
        while dealer.poll(0):
            self._hear(dealer, dealer.recv_multipart(copy=False))
        for parts in self._queue.take():
            if parts:
                self._send(dealer, parts)
        now = time.monotonic()
        if self._is_in and now - self._received_at > _SILENCE_SECONDS:
            self._is_in = False
            self._lost()
            self._on_change("lost the coordinator; waiting for it")
        if not self._is_in and now - self._sent_at > _HELLO_SECONDS:
            self._sent_at = now
            self._send(dealer, self._greeting())
        elif self._is_in and now - self._sent_at > BEAT_SECONDS:
            self._sent_at = now
            self._send(dealer, frames.alone(FrameKind.BEAT))

    def _send(self, dealer: zmq.Socket[bytes], parts: list[Any]) -> None:
        with suppress(zmq.Again):  # the coordinator is not there; the waiting thread asks another one
            dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)

    def _hear(self, dealer: zmq.Socket[bytes], parts: list[Any]) -> None:
        try:
            frame = frames.parse([part.buffer for part in parts])
            self._received_at = time.monotonic()
            self._answer(dealer, frame)
        except FrameError as error:
            _log.warning("the coordinator sent an invalid message: %s", error)
