"""Main's end of a transfer, on a clock of the test's own. Would catch files that go to strangers, pieces that are in
the way of experts, a rate that is not kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smoe import __version__
from smoe.cluster import files, frames
from smoe.cluster.files import CHUNK_BYTES, PIECE_BYTES, Manifest, PiecePosition
from smoe.cluster.frames import Frame, FrameError, FrameKind
from smoe.cluster.pace import SendRate
from smoe.cluster.sending import CALM_SECONDS, Courier

SAID = {"smoe": __version__, "precision": "auto", "name": "w", "code": None, "known": None}
pytestmark = pytest.mark.usefixtures("own_cache")


class Clock:
    """Goes on where somebody sleeps, or the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Wire:
    """What a courier has sent, and its bell."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Frame]] = []
        self.rung = threading.Semaphore(0)

    def send(self, route: bytes, parts: list[Any]) -> bool:
        self.sent.append((route, frames.parse([bytes(part) for part in parts])))
        return True

    @property
    def kinds(self) -> list[FrameKind]:
        return [frame.kind for _, frame in self.sent]


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)) * (2 * CHUNK_BYTES // 256))
    return {"model.safetensors": path}


@pytest.fixture
def courier(paths: dict[str, Path]) -> Iterator[Callable[..., tuple[Courier, Wire, Clock, Manifest]]]:
    made: list[Courier] = []

    def begin(**options: Any) -> tuple[Courier, Wire, Clock, Manifest]:
        """A courier whose checksums are made, for workers whose key is `known`."""
        clock, wire = Clock(), Wire()
        given = {"clock": clock, "sleep": clock.sleep} | options
        courier = Courier(paths, "auto", lambda key, _: "" if key.startswith("known") else "a stranger", **given)
        made.append(courier)
        courier.begin(wire.rung.release)
        courier.turn(True, wire.send)  # it may read
        courier.receive(b"r", "known", said(), wire.send)
        assert wire.kinds == [FrameKind.SUMMING]
        manifest = pushed_manifest(courier, wire)
        wire.sent.clear()
        return courier, wire, clock, manifest

    yield begin
    for each in made:
        each.close()


def pushed_manifest(courier: Courier, wire: Wire) -> Manifest:
    """What a worker that has been answered SUMMING is sent without another greeting."""
    while wire.kinds[-1] is not FrameKind.MANIFEST:
        assert wire.rung.acquire(timeout=30)
        courier.turn(True, wire.send)
    return files.parse_manifest(wire.sent[-1][1])


def said(**other: Any) -> Frame:
    return frames.parse(frames.talk(FrameKind.FILES, SAID | other))


def asked(piece: int) -> Frame:
    return frames.parse(files.ask(PiecePosition(0, piece)))


def pieces(wire: Wire) -> list[int]:
    return [frame.request for _, frame in wire.sent if frame.kind is FrameKind.PIECE]


def until(courier: Courier, wire: Wire, count: int) -> None:
    """Have so many pieces sent, as the sockets' thread does."""
    courier.turn(True, wire.send)
    while len(wire.sent) < count:
        assert wire.rung.acquire(timeout=30)
        courier.turn(True, wire.send)


def test_strangers_get_nothing(courier: Any) -> None:
    courier, wire, _, _ = courier()
    courier.receive(b"s", "stranger", said(), wire.send)
    assert frames.fields_of(wire.sent[0][1])["why"] == "a stranger"
    courier.receive(b"s", "stranger", asked(0), wire.send)
    courier.receive(b"another route", "known", asked(0), wire.send)
    courier.receive(b"r", "known", asked(1), wire.send)
    until(courier, wire, 2)
    assert pieces(wire) == [1], "of the one who is known"
    assert {route for route, frame in wire.sent if frame.kind is FrameKind.PIECE} == {b"r"}


@pytest.mark.parametrize("other", [{"smoe": "0"}, {"precision": "int4"}])
def test_who_could_not_use_them_is_told(courier: Any, other: dict[str, str]) -> None:
    courier, wire, _, _ = courier()
    courier.receive(b"r", "known", said(**other), wire.send)
    assert wire.kinds == [FrameKind.REFUSED]
    assert f"its {next(iter(other))} is" in frames.fields_of(wire.sent[0][1])["why"]


def test_who_has_the_manifest_is_not_sent_it_again(courier: Any) -> None:
    courier, wire, _, manifest = courier()
    courier.receive(b"r", "known", said(known=manifest.mark, missing_bytes=7), wire.send)
    assert wire.kinds == [FrameKind.SAME]
    assert courier.missing == {"known": 7}


def test_what_is_no_piece_is_refused(courier: Any) -> None:
    courier, wire, _, _ = courier()
    with pytest.raises(FrameError):
        courier.receive(b"r", "known", asked(2 * CHUNK_BYTES // PIECE_BYTES), wire.send)
    with pytest.raises(FrameError):
        courier.receive(b"r", "known", frames.parse(files.piece(PiecePosition(0, 0), b"x")), wire.send)


def test_workers_take_turns(courier: Any) -> None:
    courier, wire, clock, _ = courier()
    courier.turn(False, wire.send)
    courier.receive(b"r2", "known 2", said(), wire.send)
    wire.sent.clear()
    for piece in range(4):
        courier.receive(b"r", "known", asked(piece), wire.send)
    courier.receive(b"r2", "known 2", asked(9), wire.send)
    clock.sleep(CALM_SECONDS)
    until(courier, wire, 5)
    assert pieces(wire).index(9) < 4, "it does not wait for all of the other's"


def test_pieces_stay_in_the_gaps_between_requests(courier: Any) -> None:
    """One in each, however long the thread looks; many when the coordinator has nothing else to do."""
    courier, wire, clock, _ = courier()
    for piece in range(6):
        courier.receive(b"r", "known", asked(piece), wire.send)
    for _ in range(2):
        assert wire.rung.acquire(timeout=30)
    courier.turn(False, wire.send)
    assert pieces(wire) == [], "somebody waits for an expert"
    for _ in range(5):
        courier.turn(True, wire.send)
    assert pieces(wire) == [0]
    courier.turn(False, wire.send)
    courier.turn(True, wire.send)
    courier.turn(True, wire.send)
    assert pieces(wire) == [0, 1]
    clock.sleep(CALM_SECONDS)
    until(courier, wire, 6)
    assert pieces(wire) == list(range(6))


def test_a_new_greeting_forgets_what_was_asked_before(courier: Any) -> None:
    courier, wire, clock, manifest = courier()
    courier.turn(False, wire.send)
    for piece in range(10):
        courier.receive(b"r", "known", asked(piece), wire.send)
    for _ in range(2):
        assert wire.rung.acquire(timeout=30)  # these two are read
    courier.receive(b"r'", "known", said(known=manifest.mark), wire.send)
    courier.receive(b"r'", "known", asked(20), wire.send)
    wire.sent.clear()
    clock.sleep(CALM_SECONDS)
    until(courier, wire, 3)
    assert pieces(wire) == [0, 1, 20]


def test_a_rate_is_kept(courier: Any) -> None:
    courier, wire, clock, _ = courier(rate=PIECE_BYTES / 2)
    for piece in range(8):
        courier.receive(b"r", "known", asked(piece), wire.send)
    until(courier, wire, 8)
    assert clock.now == pytest.approx(14), "the first goes at once, each other two seconds after the one before"


def test_a_pace_saves_nothing_up() -> None:
    clock = Clock()
    pace = SendRate(100, clock)
    clock.now = 50
    assert pace.left_seconds() == 0
    pace.book(200)
    assert pace.left_seconds() == 2
    pace.book(100)
    assert pace.left_seconds() == 3
    clock.now = 60
    assert pace.left_seconds() == 0
    pace.book(100)
    assert pace.left_seconds() == 1
    assert SendRate(None, clock).left_seconds() == 0


def test_a_file_that_was_written_is_not_sent(courier: Any, paths: dict[str, Path]) -> None:
    courier, wire, _, manifest = courier()
    paths["model.safetensors"].write_bytes(b"another")
    courier.receive(b"r", "known", asked(0), wire.send)
    end = time.monotonic() + 30
    while courier._known is not None:
        assert time.monotonic() < end
        time.sleep(0.001)
    courier.receive(b"r", "known", said(known=manifest.mark), wire.send)
    assert wire.kinds[-1] is FrameKind.REFUSED
    assert pushed_manifest(courier, wire).files[0].nbytes == 7
    assert pieces(wire) == []
    assert any(
        "written or replaced" in frames.fields_of(frame)["why"]
        for _, frame in wire.sent
        if frame.kind is FrameKind.REFUSED
    )
