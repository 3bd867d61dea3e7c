"""Who may speak to main: what the connections ask, and whom they ask."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import zmq

from smoe.cluster.members import Member
from smoe.cluster.requests import Proof


class Doorkeeper(Protocol):
    """Decides who belongs to the cluster. Called by the link's thread."""

    def may_knock(self, key: str) -> bool:
        """Whether somebody with this public key may speak at all."""

    def knocked(self, key: str, said: dict[str, Any]) -> Member | str:
        """A HELLO: a new member that is to be proven, or why it is refused."""

    def welcome(self) -> dict[str, Any]:
        """What a new member is told."""

    def proof(self, member: Member) -> Sequence[Proof]:
        """What it is to compute before it is believed."""

    def tick(self) -> None:
        """Some time has passed."""


class Keys:
    """What ZeroMQ's authenticator asks."""

    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this key may connect."""
        del domain
        return self._doorkeeper.may_knock(key.decode())


def user_of(part: Any) -> str:
    """The public key that a message came with, as the authenticator has put it."""
    with suppress(zmq.ZMQError):
        return str(part.get("User-Id"))
    return ""
