"""The worker's end of its connection to the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from smoe.cluster import frames
from smoe.cluster.address import to_connect_to
from smoe.cluster.frames import Frame
from smoe.cluster.stored_identity import Worker
from smoe.errors import WorkerRefusedError

_TURNED_AWAY = 400
"""The status with which the coordinator's authenticator rejects a key (ZMTP's ZAP); other values mean an internal
failure."""


def dial(dealer: zmq.Socket[bytes], me: Worker, most_bytes: int) -> str:
    """Connect a worker's socket, with encryption, to the coordinator whose key is in `me`. The socket reconnects
    whenever the connection is lost. Return the coordinator's address.

    Message parts longer than `most_bytes` are not received. Raises `ClusterError` if the coordinator's name does not
    resolve.
    """
    dealer.curve_serverkey = me.main_key.encode()
    dealer.curve_publickey, dealer.curve_secretkey = me.keys.public.encode(), me.keys.secret.encode()
    dealer.setsockopt(zmq.LINGER, 0)
    at = to_connect_to(me.address)
    dealer.setsockopt(zmq.IPV6, int(at.is_ipv6))
    dealer.setsockopt(zmq.IMMEDIATE, 1)  # no queue while the coordinator is not there
    dealer.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    dealer.setsockopt(zmq.RECONNECT_IVL, 100)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 400)
    dealer.connect(at.address)
    return at.address


@contextmanager
def watched(dealer: zmq.Socket[bytes], me: Worker) -> Iterator[Callable[[], None]]:
    """Yield a function that raises `WorkerRefusedError` if the coordinator's authenticator has rejected this worker's
    key. The socket's events are the only sign of a rejection."""
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
    """Return the error for a REFUSED message, with the coordinator's reason."""
    why = frames.fields_of(frame).get("why", "no reason given")
    return WorkerRefusedError(f"the coordinator refuses worker {me.name}: {why}")
