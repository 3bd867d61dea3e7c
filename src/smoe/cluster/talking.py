"""The connection thread of a machine in a cluster, worker or draft model.

    connected --greeting until answered--> in: beats --coordinator silent for a while--> greeting again

The machine's other work is done by other threads, which wake this one when they have something to send.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import zmq

from smoe.cluster import frames
from smoe.cluster.dial import dial, watched
from smoe.cluster.frames import Frame, FrameError, FrameKind
from smoe.cluster.pollable_queue import PollableQueue
from smoe.cluster.stored_identity import Worker

BEAT_SECONDS = 0.1
_HELLO_SECONDS = 0.5
_SILENCE_SECONDS = 3.0
"""Seconds without a message after which the coordinator counts as lost."""

_log = logging.getLogger(__name__)


class Talking(ABC):
    """The connection of this machine to the coordinator: sends the greeting until the coordinator answers, processes
    the coordinator's messages, and sends the messages in `_queue`."""

    def __init__(self, me: Worker, on_change: Callable[[str], None]) -> None:
        """`on_change` is called with a message for the user when this machine is admitted or has lost the
        coordinator."""
        self._me = me
        self._on_change = on_change
        self._queue: PollableQueue[list[Any]] = PollableQueue()
        self._received_at = self._sent_at = 0.0
        self._is_in = self._has_greeted = False
        """Whether the coordinator has answered, and whether a greeting has been sent since it last had to be."""
        self.is_ending = False
        """Whether `end` was called."""

    def end(self) -> None:
        """Make `serve` return. Any thread may call this method."""
        self.is_ending = True
        self._queue.put([])

    def serve(self) -> None:
        """Run until `end` is called. Raises `WorkerRefusedError` where the coordinator refuses this machine."""
        context = zmq.Context()
        try:
            with context.socket(zmq.DEALER) as dealer, watched(dealer, self._me) as check_known:
                self._connect(dealer)
                poller = zmq.Poller()
                poller.register(dealer, zmq.POLLIN)
                poller.register(self._queue.fileno(), zmq.POLLIN)
                while not self.is_ending:
                    connected = 0 if self._is_in or self._has_greeted else zmq.POLLOUT
                    poller.modify(dealer, zmq.POLLIN | connected)
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
        """The longest part of a message that is received, in bytes."""

    @abstractmethod
    def _greeting(self) -> list[Any]:
        """Return the first message to the coordinator, which is repeated until the coordinator answers."""

    @abstractmethod
    def _answer(self, dealer: zmq.Socket[bytes], frame: Frame) -> None:
        """Process a message of the coordinator. Raises `FrameError` for an invalid message, and `ClusterError` if this
        machine must end."""

    @abstractmethod
    def _over(self) -> None:
        """Release the resources of the subclass, because the connection to the coordinator has ended."""

    def _lost(self) -> None:
        """React to the loss of the coordinator; a subclass may override this method, which by default does nothing."""

    def _connect(self, dealer: zmq.Socket[bytes]) -> None:
        self._address = dial(dealer, self._me, self._part_bytes)

    def _turn(self, dealer: zmq.Socket[bytes]) -> None:
        """Process all messages that have arrived, and send all queued messages and the greeting or beat that is due."""
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
        if not self._is_in and (now - self._sent_at > _HELLO_SECONDS or not self._has_greeted):
            self._sent_at = now
            self._has_greeted = self._send(dealer, self._greeting())
        elif self._is_in and now - self._sent_at > BEAT_SECONDS:
            self._sent_at = now
            self._send(dealer, frames.alone(FrameKind.BEAT))

    def _send(self, dealer: zmq.Socket[bytes], parts: list[Any]) -> bool:
        """Return whether there is a connection. Without one the message is dropped: the waiting thread asks another
        worker."""
        try:
            dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def _hear(self, dealer: zmq.Socket[bytes], parts: list[Any]) -> None:
        try:
            frame = frames.parse([part.buffer for part in parts])
            self._received_at = time.monotonic()
            self._answer(dealer, frame)
        except FrameError as error:
            _log.warning("the coordinator sent an invalid message: %s", error)
