"""What the benchmark of clusters makes of what it has measured, by hand, and its switch on ordinary sockets.

Would catch a wait put down to the wrong answer, a fault blamed for what a token always takes, ratios of runs of
different rounds, packets that come to the wrong machine or in another order.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("fcntl")

from bench.cluster import network
from bench.cluster.aftermath import Fault, Lost, Span, Token, judged
from bench.cluster.decoding import Answer, waits
from bench.cluster.network import LINKS, Link, NetworkError, relay
from bench.cluster.speed import KINDS, Cell, rows, table
from bench.cluster.workers import Shape

DEMO = Path(__file__).parents[2] / "src" / "smoe" / "demo"
SHAPE = Shape(DEMO, layers=2, experts=8, chosen=2, expert_bytes=100)


def test_a_shape_is_that_of_the_model() -> None:
    shape = Shape.of(DEMO)
    assert (shape.layers, shape.experts, shape.chosen, shape.all_experts) == (12, 64, 8, 768)
    assert shape.expert_bytes == 3 * 192 * 32 * 2


# -- the switch -------------------------------------------------------------------------------------------------------


@pytest.fixture
def plugs() -> Iterator[list[socket.socket]]:
    """The machines' ends of three devices, the others of which the relay holds."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for mine, its in pairs:
        mine.settimeout(10)
        its.setblocking(False)

    devices = [its.fileno() for _, its in pairs]
    thread = threading.Thread(target=relay, args=(devices, Link(1e9, 1e-3)), daemon=True)
    thread.start()
    yield [mine for mine, _ in pairs]
    for mine, _ in pairs:
        mine.close()
    thread.join(10)
    for _, its in pairs:
        its.close()


def packet(to: int, content: bytes) -> bytes:
    """IPv4, as far as the relay looks."""
    return bytes([0x45]) + bytes(15) + bytes([10, 77, 0, to + 1]) + content


def test_packets_come_to_whom_they_are_addressed_in_order(plugs: list[socket.socket]) -> None:
    sent = [packet(2, bytes([n])) for n in range(40)]
    for each in sent:
        plugs[0].send(each)
    plugs[1].send(packet(0, b"back"))
    assert [plugs[2].recv(4096) for _ in sent] == sent
    assert plugs[0].recv(4096) == packet(0, b"back")


def test_packets_to_nobody_are_dropped(plugs: list[socket.socket]) -> None:
    plugs[0].send(packet(7, b"nobody"))
    plugs[0].send(b"\x60" + packet(1, b"no IPv4")[1:])
    plugs[0].send(packet(1, b"for you"))
    assert plugs[1].recv(4096) == packet(1, b"for you")


def test_without_root_or_devices_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match="need root"):
        network.check()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network, "_TUN", tmp_path / "tun")
    with pytest.raises(NetworkError, match="not here"):
        network.check()


# -- speed ------------------------------------------------------------------------------------------------------------


def answer(layer: int, came: float, whole: float, there: float, computing: float) -> Answer:
    return Answer(layer, 1, came, whole, there, computing)


def test_a_layer_waits_for_its_last_answer() -> None:
    heard = [
        answer(0, 1.0, 0.5, 0.4, 0.1),
        answer(0, 2.0, 1.5, 1.2, 0.2),  # the last of layer 0
        answer(1, 2.5, 0.3, 0.1, 0.1),
        answer(0, 4.0, 0.7, 0.5, 0.5),  # the next token
    ]
    found = waits(heard, 2, 1.0)
    assert found["loads there"] == pytest.approx((1.0 + 0.0 + 0.0) / 2)
    assert found["computing there"] == pytest.approx((0.2 + 0.1 + 0.5) / 2)
    assert found["between"] == pytest.approx((0.3 + 0.2 + 0.2) / 2)
    assert found["requests that waited for loads"] == pytest.approx(2 / 4)


def ran(*tokens: float) -> dict[str, Any]:
    return {
        "seconds": list(tokens),
        "ttft_seconds": 1.0,
        "is_exact": True,
        "loads": {0: 0.0, 1: 2.0},
        "at_workers": 3.0,
        "experts": 4.0,
        "waits": {"between": 0.1, "requests that waited for loads": 0.5},
        "slots": 2,
        "draft_bytes": 100,
        "workers": [{"slots": 6}],
        "peak_rss_bytes": {1: 1 << 20},
    }


def test_ratios_are_of_runs_of_one_round() -> None:
    one, four, resident = Cell(1, "finish", "1gbit", 8), Cell(4, "finish", "1gbit", 8), Cell(4, "resident", "1gbit", 0)
    results = {
        one: [ran(4.0), ran(8.0), ran(4.0)],
        four: [ran(1.0, 1.0), ran(1.0, 3.0), ran(2.0)],
        resident: [ran(0.5), ran(0.5), ran(0.5)],
    }
    found = {Cell(**row["cell"]): row for row in rows(results, SHAPE)}
    assert found[four]["speed_over_one_worker"] == {"median": 4.0, "least": 2.0, "most": 4.0}
    assert found[four]["share_of_resident_speed"] == {"median": 0.25, "least": 0.25, "most": 0.5}
    assert found[one]["speed_over_one_worker"] is None
    assert found[four]["share_of_experts_in_memory"] == (2 + 6 + 1) / 16
    text = table(results, SHAPE)
    assert "4 x finish @ 8, 1gbit" in text and "4.00 (2.00-4.00)" in text and "logits equal" in text


def test_each_kind_is_compared_with_its_own_placement() -> None:
    assert Cell(4, "od-moe", "1gbit", 8).reference == Cell(4, "resident-od-moe", "1gbit", 0)
    assert {Cell(4, kind, "1gbit", 8).reference.kind for kind in KINDS} <= KINDS.keys()
    assert Cell.named("4xod-moe-next-gate", "1gbit", 8) == Cell(4, "od-moe-next-gate", "1gbit", 8)
    assert Cell.named("8xfinish@3", "1gbit", 8).slots == 3
    assert Cell.named("8xresident@3", "1gbit", 8).is_resident
    with pytest.raises(SystemExit, match="a cell is WORKERSxKIND"):
        Cell.named("4xfast", "1gbit", 8)
    assert set(LINKS) == {"100mbit", "1gbit", "unshaped"}


# -- the soak ---------------------------------------------------------------------------------------------------------


def token(position: int, began: float, seconds: float, is_equal: bool = True) -> Token:
    return Token(position, began, began + seconds, is_equal, deadline=0.05)


def test_a_fault_is_blamed_for_what_it_added() -> None:
    tokens = [token(1, 0.0, 0.1), token(2, 0.1, 0.2), token(1, 10.0, 0.18), token(2, 10.18, 0.2), token(1, 20.0, 0.1)]
    found = judged(tokens, [Fault("kill", 1, 10.05, 10.2)], load=0.01)
    assert found["all_equal"] and found["tokens"] == 5
    row = found["kinds"]["kill"]
    assert row["faults"] == 1
    assert row["added_seconds"] == [pytest.approx(0.08)], "of the token hit, beyond what that one usually takes"
    assert row["beyond_seconds"] == [pytest.approx(0.08 - 0.05 - 0.01)]


def test_a_freeze_may_cost_the_deadline_of_its_token() -> None:
    tokens = [token(1, 0.0, 0.1), token(1, 10.0, 0.15)]
    row = judged(tokens, [Fault("freeze", 1, 10.05, 10.2)], load=0.01)["kinds"]["freeze"]
    assert row["beyond_seconds"] == [pytest.approx(0.05 - 0.05 - 0.01)]


def test_prompts_are_apart() -> None:
    tokens = [token(0, 0.0, 1.0), token(1, 1.0, 0.1), token(0, 10.0, 1.5), token(1, 11.5, 0.1)]
    kinds = judged(tokens, [Fault("kill", 1, 10.5, 10.6)], load=0.01)["kinds"]
    assert kinds.keys() == {"kill in a prompt"} and kinds["kill in a prompt"]["added_seconds"] == [pytest.approx(0.5)]


def test_the_layer_that_lost_a_request_is_told_from_those_after_it() -> None:
    """Two requests of layer 1 are lost; layer 2 takes longer with a worker less, and so does the next token."""
    tokens = [token(1, 0.0, 0.3), token(2, 0.3, 0.3), token(1, 10.0, 0.4), token(2, 10.4, 0.32), token(1, 20.0, 0.3)]
    spans = [
        Span(layer, begin + layer * 0.1, begin + layer * 0.1 + took)
        for begin, times in ((0.0, (0.05, 0.05, 0.05)), (0.3, (0.05, 0.05, 0.05)), (20.0, (0.05, 0.05, 0.05)))
        for layer, took in enumerate(times)
    ]
    spans += [Span(0, 10.0, 10.05), Span(1, 10.1, 10.22), Span(2, 10.3, 10.37), Span(1, 10.5, 10.57)]
    lost = [Lost(1, 2, 10.1, 0.03, 10.14, 10.21), Lost(1, 1, 10.11, 0.04, 10.14, 10.17)]
    found = judged(tokens, [Fault("kill", 1, 10.12, 10.9)], 0.01, spans, lost)["kinds"]["kill"]["apart"][0]
    assert found["lost"] == 2 and found["position"] == 1
    assert found["noticing"] == pytest.approx(0.02), "since the fault: it was asked before"
    assert found["anew"] == pytest.approx(0.07), "until the last of them"
    assert found["layer"] == pytest.approx(0.07) and found["deadline"] == pytest.approx(0.04)
    assert found["token"] == pytest.approx(0.10)
    assert found["later"] == pytest.approx(0.02)


def test_other_logits_are_seen() -> None:
    assert not judged([token(0, 0.0, 0.1), token(0, 1.0, 0.1, is_equal=False)], [], 0.01)["all_equal"]
