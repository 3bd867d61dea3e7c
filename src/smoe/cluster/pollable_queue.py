"""A queue for a thread that waits on sockets: a new item wakes the thread."""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class PollableQueue(Generic[T]):
    """A queue with a file descriptor that becomes readable. Any thread may put; one thread takes."""

    def __init__(self) -> None:
        self._mine, self._theirs = socket.socketpair()
        self._mine.setblocking(False)
        self._theirs.setblocking(False)
        self._waiting: deque[T] = deque()

    def fileno(self) -> int:
        return self._mine.fileno()

    def put(self, what: T) -> None:
        """Append an item. After `close`, the item is dropped."""
        self._waiting.append(what)
        with suppress(OSError):  # full: the descriptor is readable already
            self._theirs.send(b"!")

    def take(self) -> list[T]:
        """Return all items since the last call, in order."""
        with suppress(OSError):
            while self._mine.recv(4096):
                pass
        found = []
        while self._waiting:
            found.append(self._waiting.popleft())
        return found

    def close(self) -> None:
        self._mine.close()
        self._theirs.close()
