"""A worker's end of its connection to main."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from smoe.cluster import frames
from smoe.cluster.address import to_connect_to
from smoe.cluster.frames import Frame
from smoe.cluster.identity import Worker
from smoe.errors import WorkerRefusedError

_TURNED_AWAY = 400
"""What main's authenticator says of a key that may not connect (ZMTP's ZAP); others mean that it failed itself."""


def dial(dealer: zmq.Socket[bytes], me: Worker, most_bytes: int) -> str:
    """Connect, encrypted, to the main that `me` knows by its key: now, and again whenever one is there; returns the
    address as the socket has it. A part of a message that is longer than `most_bytes` is not received.

    Raises `ClusterError` where the coordinator's name does not resolve.
    """
    dealer.curve_serverkey = me.main_key.encode()
    dealer.curve_publickey, dealer.curve_secretkey = me.keys.public.encode(), me.keys.secret.encode()
    dealer.setsockopt(zmq.LINGER, 0)
    at = to_connect_to(me.address)
    dealer.setsockopt(zmq.IPV6, int(at.is_ipv6))
    dealer.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a main that is not there
    dealer.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    dealer.setsockopt(zmq.RECONNECT_IVL, 100)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    dealer.connect(at.address)
    return at.address


@contextmanager
def watched(dealer: zmq.Socket[bytes], me: Worker) -> Iterator[Callable[[], None]]:
    """Gives what raises `WorkerRefusedError` once main has turned this worker's key away, which says nothing else."""
    monitor: Any = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)

    def check() -> None:
        while monitor.poll(0):
            if parse_monitor_message(monitor.recv_multipart())["value"] == _TURNED_AWAY:
                raise WorkerRefusedError(
                    f"the coordinator does not know worker {me.name}: its key was never admitted, or was removed; "
                    "join with a new invitation (smoe cluster invite, on the coordinator)"
                )

    try:
        yield check
    finally:
        if not dealer.closed:
            dealer.disable_monitor()
        monitor.close(linger=0)


def refusal(me: Worker, frame: Frame) -> WorkerRefusedError:
    """The reason in the coordinator's REFUSED."""
    why = frames.fields_of(frame).get("why", "no reason given")
    return WorkerRefusedError(f"the coordinator refuses worker {me.name}: {why}")
