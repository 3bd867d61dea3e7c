"""What there and back costs: messages by plain TCP, and by ZeroMQ with CURVE as a cluster sends them, by one switch.

Two machines echo what main sends to both at once; a token is 32 such hops, one after the other. The two ways alternate.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import zmq

from bench.cluster.child import Child
from bench.cluster.network import LINKS, Network, address
from bench.cluster.results import spread, write
from smoe.cluster import frames
from smoe.cluster.address import Endpoint
from smoe.cluster.listening_sockets import ListeningSockets
from smoe.cluster.stored_identity import KeyPair

_HOPS = 32
_MACHINES = (1, 2)
_WARM_HOPS = 32
_PORT = 5717
_LENGTH = struct.Struct("<I")
_RUN_SECONDS = 120.0

Hop = Callable[[bytes], None]


def run(options: argparse.Namespace) -> None:
    """Rounds of both ways; the bar is 1.5."""
    sizes = [int(each) for each in options.sizes.split(",")]
    found: dict[str, Any] = {}
    lines = []
    for name in options.links.split(","):
        with Network(len(_MACHINES) + 1, LINKS[name]) as network:
            rounds = [_measure(network, sizes, options.tokens) for _ in range(options.rounds)]
        for size in sizes:
            ways = {way: [each[way][str(size)] for each in rounds] for way in _WAYS}
            ratios = [ours / plain for plain, ours in zip(ways["tcp"], ways["zmq-curve"], strict=True)]
            row = {way: spread(taken) for way, taken in ways.items()} | {"ratio": spread(ratios)}
            found[f"{name} {size}"] = row
            plain, ours = (1e3 * row[way]["median"] for way in _WAYS)
            lines.append(
                f"{name}, {size} bytes: TCP {plain:.1f} ms a token of {_HOPS} hops, ZeroMQ with CURVE {ours:.1f}, "
                f"{row['ratio']['median']:.2f} times ({row['ratio']['least']:.2f}-{row['ratio']['most']:.2f})"
            )
    write(options, {"hops": found}, "\n".join(lines) + "\n")


def hop_seconds(network: Network, machines: int, size: int, tokens: int) -> float:
    """There and back to so many machines at once, by ZeroMQ with CURVE."""
    taken = _one_way(network, "zmq-curve", [size], tokens, range(1, machines + 1))
    return taken[str(size)] / _HOPS


def _measure(network: Network, sizes: list[int], tokens: int) -> dict[str, Any]:
    """{way: {size: median seconds of a token}}, each by processes of its own."""
    return {way: _one_way(network, way, sizes, tokens) for way in _WAYS}


def _one_way(
    network: Network, way: str, sizes: list[int], tokens: int, machines: Sequence[int] = _MACHINES
) -> dict[str, float]:
    connected, echo = _WAYS[way]
    keys = KeyPair.new()

    def work(child: Child) -> None:
        network.enter(0)
        with connected(keys, len(machines)) as hop:
            child.say({str(size): _token_seconds(hop, size, tokens) for size in sizes})

    def answering(machine: int) -> Callable[[Child], None]:
        def answer(_: Child) -> None:
            network.enter(machine)
            echo(keys.public)

        return answer

    with ExitStack() as made:
        main = Child("main", work)
        made.callback(main.kill)
        for machine in machines:
            made.callback(Child(f"echo {machine}", answering(machine)).kill)
        return dict(main.hear(_RUN_SECONDS))


def _token_seconds(hop: Hop, size: int, tokens: int) -> float:
    message = os.urandom(size)
    for _ in range(_WARM_HOPS):
        hop(message)
    taken = []
    for _ in range(tokens):
        began = perf_counter()
        for _ in range(_HOPS):
            hop(message)
        taken.append(perf_counter() - began)
    return spread(taken)["median"]


# -- TCP --------------------------------------------------------------------------------------------------------------


@contextmanager
def _by_tcp(_: KeyPair, machines: int) -> Iterator[Hop]:
    with socket.create_server((address(0), _PORT)) as server, ExitStack() as made:
        others = [made.enter_context(server.accept()[0]) for _ in range(machines)]
        for other in others:
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def hop(message: bytes) -> None:
            framed = _LENGTH.pack(len(message)) + message
            for other in others:
                other.sendall(framed)
            for other in others:
                _receive(other)

        yield hop


def _echo_tcp(_: str) -> None:
    with _connected() as main, suppress(EOFError):  # main has ended
        main.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            message = _receive(main)
            main.sendall(_LENGTH.pack(len(message)) + message)


def _connected() -> socket.socket:
    """As soon as main listens."""
    while True:
        try:
            return socket.create_connection((address(0), _PORT))
        except ConnectionRefusedError:
            sleep(0.02)


def _receive(connection: socket.socket) -> bytearray:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, nbytes: int) -> bytearray:
    whole = bytearray(nbytes)
    rest = memoryview(whole)
    while rest:
        came = connection.recv_into(rest)
        if came == 0:
            raise EOFError
        rest = rest[came:]
    return whole


# -- ZeroMQ -----------------------------------------------------------------------------------------------------------


@contextmanager
def _by_zmq(keys: KeyPair, machines: int) -> Iterator[Hop]:
    everybody: Any = SimpleNamespace(may_connect=lambda _: True)
    at = Endpoint(f"tcp://{address(0)}:{_PORT}", is_ipv6=False)
    with closing(ListeningSockets(at, keys.public, keys.secret, everybody, frames.MOST_BYTES)) as door:
        routes = [door.router.recv_multipart()[0] for _ in range(machines)]

        def hop(message: bytes) -> None:
            for route in routes:
                door.router.send_multipart([route, message], copy=False)
            for _ in routes:
                door.router.recv_multipart(copy=False)

        yield hop


def _echo_zmq(main_key: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.curve_serverkey = main_key.encode()
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.setsockopt(zmq.RECONNECT_IVL, 20)
        dealer.connect(f"tcp://{address(0)}:{_PORT}")
        dealer.send(b"here")
        while True:
            dealer.send_multipart(dealer.recv_multipart(copy=False), copy=False)


_WAYS: dict[str, tuple[Any, Callable[[str], None]]] = {"tcp": (_by_tcp, _echo_tcp), "zmq-curve": (_by_zmq, _echo_zmq)}


def options_of(parser: argparse.ArgumentParser) -> None:
    """What can be asked."""
    parser.add_argument("--sizes", default="8192,16384", help="bytes of a message")
    parser.add_argument("--links", default="1gbit", help=", ".join(LINKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=15)
