"""What a coordinator's sockets let in. Would catch memory taken by a client that announces a long message."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

pytest.importorskip("zmq")

from smoe.cluster.address import Endpoint
from smoe.cluster.listening_sockets import ListeningSockets
from smoe.cluster.stored_identity import KeyPair
from tests.free_port import a_free_port

PART_BYTES = 1 << 20
LONG, SHORT = 64 << 20, PART_BYTES - 1024
SENDER = """
import sys, zmq
address, server, public, secret, size = sys.argv[1:]
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    dealer.curve_serverkey = server.encode()
    dealer.curve_publickey, dealer.curve_secretkey = public.encode(), secret.encode()
    dealer.connect(address)
    dealer.send(bytes(int(size)), copy=False)
    sys.stdin.read()
    dealer.close(linger=0)
"""


class Anybody:
    def may_connect(self, key: str) -> bool:
        return True


@pytest.fixture
def opened() -> Iterator[tuple[ListeningSockets, str, KeyPair]]:
    address, keys = f"tcp://127.0.0.1:{a_free_port()}", KeyPair.new()
    membership: Any = Anybody()
    sockets = ListeningSockets(Endpoint(address, False), keys.public, keys.secret, membership, PART_BYTES)
    yield sockets, address, keys
    sockets.close()


@pytest.mark.parametrize("size", [SHORT, LONG], ids=["as planned", "longer"])
def test_a_part_longer_than_planned_is_cut_off_before_it_takes_memory(
    size: int, opened: tuple[ListeningSockets, str, KeyPair]
) -> None:
    sockets, address, keys = opened
    theirs, me = KeyPair.new(), psutil.Process()
    line = [sys.executable, "-c", SENDER, address, keys.public, theirs.public, theirs.secret, str(size)]
    before = most = me.memory_info().rss
    sender = subprocess.Popen(line, stdin=subprocess.PIPE)
    until = time.monotonic() + 60
    came, gone = 0, 0
    while time.monotonic() < until and not came and not gone:
        most = max(most, me.memory_info().rss)
        if sockets.router.poll(1):
            came = len(sockets.router.recv_multipart(copy=False)[-1].buffer)
        gone = sockets.monitor.poll(0)
    most = max(most, me.memory_info().rss)
    sender.communicate(b"")
    assert (came, bool(gone)) == ((size, False) if size == SHORT else (0, True))
    assert most - before < LONG // 4, "what was announced was not made room for"
