"""The coordinator's listening sockets, and the protocols that decide which machines may connect and join."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator

from smoe.cluster.address import Endpoint
from smoe.cluster.members import Member
from smoe.cluster.requests import Proof
from smoe.errors import ClusterError
from smoe.expert import ExpertKey

_MOST_WAITING = 64
"""The maximum number of messages of a worker that are received before they are processed."""
_log = logging.getLogger(__name__)


class Membership(Protocol):
    """Decides which workers belong to the cluster. The link's thread calls it, and the authenticator's thread calls
    `may_connect`."""

    def may_connect(self, key: str) -> bool:
        """Return whether a machine with this public key may send anything."""

    def greeted(self, key: str, fields: dict[str, Any]) -> Member | str | None:
        """Process a worker's HELLO message. Return the new member, or the reason why the worker is refused. None: the
        worker must send the message again later."""

    def welcome(self, member: Member) -> dict[str, Any]:
        """Return the fields of a new member's WELCOME."""

    def describe(self, key: str, fields: dict[str, Any]) -> list[Any]:
        """Return the reply to a DESCRIBE message. Empty: the worker must send the message again later."""

    def proof(self, member: Member) -> Sequence[Proof]:
        """Return the proofs for a member: requests that the member must compute correctly before its results are
        used."""

    def answered(self, member: Member, keys: Sequence[ExpertKey]) -> None:
        """Record that a worker has computed these experts, and therefore has them in its memory."""

    def doubt(self, member: Member, why: str) -> None:
        """Exclude a worker from the cluster, because its results are wrong."""

    def tick(self) -> None:
        """Do periodic work, such as storing the workers' state. The thread of the connections calls this at short
        intervals."""


class AdmittedKeys:
    """Answers the question of ZeroMQ's authenticator whether a machine with a given key may connect."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this key may connect."""
        del domain
        try:
            return self._membership.may_connect(key.decode())
        except Exception:  # an error would end the authenticator's thread
            _log.exception("cannot decide whether a key may connect")
            return False


class ListeningSockets:
    """The coordinator's sockets: messages come through `router`, disconnections through `monitor`. `close` closes
    both."""

    def __init__(self, address: Endpoint, public: str, secret: str, membership: Membership, part_bytes: int) -> None:
        """A machine that sends a message part longer than `part_bytes` is disconnected. Raises `ClusterError` if the
        address is not available."""
        self._context = zmq.Context()
        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback("*", AdmittedKeys(membership))
        self.router = self._context.socket(zmq.ROUTER)
        self.monitor: Any = None
        try:
            _listen(self.router, address, public, secret, part_bytes)
            self.monitor = self.router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as error:
            self.close()
            raise ClusterError(
                f"cannot listen at {address.address} ({error}); another process of smoe may be the coordinator of "
                "this cluster, or the address belongs to another machine: end that process, or choose another "
                "address (`address`)",
                setting="address",
                given=address.address,
                allowed="an address of this machine that is free",
            ) from error

    def close(self) -> None:
        if self.monitor is not None:
            self.router.disable_monitor()
            self.monitor.close(linger=0)
        self.router.close(linger=100)
        self._guard.stop()
        self._context.term()


def _listen(router: zmq.Socket[bytes], address: Endpoint, public: str, secret: str, part_bytes: int) -> None:
    """Accept encrypted connections at an address. Raises `zmq.ZMQError` where the address is not available."""
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = public.encode(), secret.encode()
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a disconnected peer raises an error
    router.setsockopt(zmq.RCVHWM, _MOST_WAITING)
    router.setsockopt(zmq.MAXMSGSIZE, part_bytes)
    router.setsockopt(zmq.IPV6, int(address.is_ipv6))
    router.bind(address.address)


def user_of(part: Any) -> str:
    """Return the public key of a message's sender, as set by the authenticator."""
    with suppress(zmq.ZMQError):
        return str(part.get("User-Id"))
    return ""
