"""A port of this machine at which a test may listen later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def a_free_port() -> int:
    """A port below those that the system gives to outgoing connections: no connection of another test takes it before
    the test listens, and a worker that dials too early cannot reach itself.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
