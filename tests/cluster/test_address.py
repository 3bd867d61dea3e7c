"""Where the coordinator listens. Would catch a wildcard in disguise, an IPv6 address cut at its last colon, a name that
the coordinator and its workers look up in different ways, a socket that other machines reach unasked.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
import pytest

pytest.importorskip("zmq")

from smoe.cluster.address import Endpoint, checked_address, reach_of, to_connect_to, to_listen_at
from smoe.cluster.listening_sockets import ListeningSockets
from smoe.cluster.stored_identity import KeyPair
from smoe.errors import ClusterError
from tests.cluster.conftest import has_ipv6
from tests.free_port import a_free_port


@pytest.mark.parametrize(
    "given, full",
    [
        ("127.0.0.1", "tcp://127.0.0.1:5717"),
        ("shelf.local:7000", "tcp://shelf.local:7000"),
        ("shelf", "tcp://shelf:5717"),
        ("tcp://[::1]:7000", "tcp://[::1]:7000"),
        ("::1", "tcp://[::1]:5717"),
        ("[fd00::5]", "tcp://[fd00::5]:5717"),
        ("tcp://[FD00:0::5]:7000", "tcp://[fd00::5]:7000"),
    ],
)
def test_an_address_gets_the_usual_port(given: str, full: str) -> None:
    assert checked_address(given) == checked_address(full) == full


@pytest.mark.parametrize(
    "given",
    ["", "ipc:///x", "host:0", "host:70000", "a b", "tcp://host:x", "[::1", "[::1]:", "-x", "127.1", "0", "10.0.0.300"],
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(
        ClusterError, match=r"`address` is .* which is not an address; give the coordinator's own address"
    ):
        checked_address(given)


@pytest.mark.parametrize(
    "given", ["*", "tcp://*:5717", "0.0.0.0", "0.0.0.0:5717", "::", "[::]:5717", "0:0::0", "::ffff:0.0.0.0"]
)
def test_a_wildcard_is_refused_and_the_switch_named(given: str) -> None:
    with pytest.raises(ClusterError, match=r"every interface of a machine.*`every_interface`"):
        checked_address(given)


@pytest.mark.parametrize("given", ["224.0.0.1", "[ff02::1]:5717", "255.255.255.255", "fe80::1%eth0"])
def test_what_is_not_one_machine_s_everywhere_is_refused(given: str) -> None:
    with pytest.raises(ClusterError, match="`address` is"):
        checked_address(given)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    known: dict[str, list[str]] = {}

    def looked_up(name: str, port: Any) -> Any:
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, "", (each, 0)) for each in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    return known


def test_a_name_is_looked_up_alike_at_both_ends(names: dict[str, list[str]]) -> None:
    names |= {"both": ["fd00::5", "192.0.2.5"], "new": ["fd00::5"], "odd": ["0.0.0.0"]}
    assert to_listen_at("tcp://both:7000", False) == Endpoint("tcp://192.0.2.5:7000", False)
    assert to_connect_to("tcp://both:7000") == Endpoint("tcp://both:7000", False)
    assert to_listen_at("tcp://new:7000", False) == Endpoint("tcp://[fd00::5]:7000", True)
    assert to_connect_to("tcp://new:7000") == Endpoint("tcp://new:7000", True)
    with pytest.raises(ClusterError, match=r"resolves to 0\.0\.0\.0 here, which stands for every interface"):
        to_listen_at("tcp://odd:7000", False)
    for ask in (to_connect_to, lambda at: to_listen_at(at, False)):
        with pytest.raises(ClusterError, match="'nobody', which is a name that this machine cannot resolve"):
            ask("tcp://nobody:7000")


def test_who_can_reach_it_is_said(names: dict[str, list[str]]) -> None:
    names["me"] = ["127.0.1.1"]
    assert reach_of("tcp://me:5717", False) == "tcp://127.0.1.1:5717, open to this machine only"
    assert "every machine that reaches this address" in reach_of("tcp://192.168.1.5:5717", False)
    assert "(a public one)" in reach_of("tcp://[2001:4860::8]:5717", False)
    everywhere = reach_of("tcp://192.168.1.5:5717", True)
    assert "tcp://*:5717, open to every machine" in everywhere and "tcp://192.168.1.5:5717" in everywhere


class Nobody:
    def may_connect(self, key: str) -> bool:
        return False


@pytest.mark.skipif(os.name == "nt", reason="psutil asks for more rights there")
@pytest.mark.parametrize(
    "given, everywhere, seen",
    [
        ("127.0.0.1", False, {"127.0.0.1"}),
        ("localhost", False, {"127.0.0.1"}),
        pytest.param("::1", False, {"::1"}, marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
        ("127.0.0.1", True, {"::", "0.0.0.0"}),
    ],
)
def test_it_listens_where_it_says(given: str, everywhere: bool, seen: set[str]) -> None:
    port, keys, nobody = a_free_port(), KeyPair.new(), Nobody()
    at = to_listen_at(checked_address(f"[{given}]:{port}" if ":" in given else f"{given}:{port}"), everywhere)
    membership: Any = nobody
    sockets = ListeningSockets(at, keys.public, keys.secret, membership, 1 << 20)
    found = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.laddr.port == port}
    sockets.close()
    assert found and found <= seen
