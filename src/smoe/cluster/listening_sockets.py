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
"""Messages of a worker that are received before they are looked at."""
_log = logging.getLogger(__name__)


class Gate(Protocol):
    """Decides which keys may connect. Called by the authenticator's thread."""

    def may_connect(self, key: str) -> bool:
        """Whether a machine with this public key may send anything."""


class Membership(Gate, Protocol):
    """Decides who belongs to the cluster. Called by the link's thread."""

    def greeted(self, key: str, fields: dict[str, Any]) -> Member | str | None:
        """A HELLO: a new member that is to be proven, or why it is refused; None: it says so again."""

    def welcome(self, member: Member) -> dict[str, Any]:
        """The fields of a new member's WELCOME."""

    def describe(self, key: str, fields: dict[str, Any]) -> list[Any]:
        """A DESCRIBE: the answer; empty: it asks again."""

    def proof(self, member: Member) -> Sequence[Proof]:
        """What it is to compute before it is believed."""

    def answered(self, member: Member, keys: Sequence[ExpertKey]) -> None:
        """It has computed these."""

    def doubt(self, member: Member, why: str) -> None:
        """What a member has computed cannot be believed: it belongs to the cluster no longer."""

    def tick(self) -> None:
        """Some time has passed."""


class AdmittedKeys:
    """What ZeroMQ's authenticator asks."""

    def __init__(self, membership: Gate) -> None:
        self._membership = membership

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this key may connect."""
        del domain
        try:
            return self._membership.may_connect(key.decode())
        except Exception:  # would end the thread that all connections wait for
            _log.exception("cannot decide whether a key may connect")
            return False


class ListeningSockets:
    """The coordinator's sockets: messages come through `router`, disconnections through
    `monitor`. `close` closes both."""

    def __init__(self, address: Endpoint, public: str, secret: str, membership: Gate, part_bytes: int) -> None:
        """A sender of a longer part than `part_bytes` is disconnected. Raises `ClusterError` where the
        address cannot be listened at."""
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
                f"cannot listen at {address.address} ({error}); another smoe may be the coordinator of this cluster, "
                "or the address is not this machine's: end the other one, or choose another address",
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
    """Take encrypted connections at an address; raises `zmq.ZMQError` where it cannot be had."""
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = public.encode(), secret.encode()
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to who has gone fails, and says so
    router.setsockopt(zmq.RCVHWM, _MOST_WAITING)
    router.setsockopt(zmq.MAXMSGSIZE, part_bytes)
    router.setsockopt(zmq.IPV6, int(address.is_ipv6))
    router.bind(address.address)


def user_of(part: Any) -> str:
    """The public key that a message came with, as the authenticator has put it."""
    with suppress(zmq.ZMQError):
        return str(part.get("User-Id"))
    return ""
