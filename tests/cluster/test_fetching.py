"""Files reach a worker once and as they are, whatever happens on the way. Would catch a chunk that is kept without
being looked at, a file that is taken for whole, bytes that are fetched twice, a folder that is filled to the brim.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq

from smoe.cluster import fetching, files, frames
from smoe.cluster.admission import Admission
from smoe.cluster.fetching import Course, Fetcher
from smoe.cluster.file_sender import FileSender
from smoe.cluster.files import CHUNK_BYTES, PIECE_BYTES, Manifest, PiecePosition, SentFile
from smoe.cluster.frames import FrameKind
from smoe.cluster.identity import Coordinator, KeyPair, Worker, read_coordinator, store_coordinator
from smoe.errors import ClusterError, DiskSpaceError
from tests.cluster.conftest import member

pytestmark = pytest.mark.usefixtures("own_cache")
PIECES = CHUNK_BYTES // PIECE_BYTES


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Path]:
    """Three files that are no model: of many chunks, of one, of a few bytes."""
    folder = tmp_path / "main"
    folder.mkdir()
    contents = {"model.safetensors": 3 * CHUNK_BYTES + 12_345, "experts.int4.smoe": CHUNK_BYTES, "config.json": 77}
    for n, (name, nbytes) in enumerate(contents.items()):
        (folder / name).write_bytes(random.Random(n).randbytes(nbytes))
    return {name: folder / name for name in contents}


class Sending(NamedTuple):
    """A coordinator that sends files."""

    post: FileSender
    thread: threading.Thread
    whole: list[str]

    def end(self) -> None:
        self.post.end()
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def send(coordinator: Coordinator, model: dict[str, Path]) -> Iterator[Callable[[], Sending]]:
    """Begin to send the model's files, as another coordinator each time."""
    begun: list[Sending] = []

    def begin() -> Sending:
        whole: list[str] = []
        post = FileSender(read_coordinator("test"), model, "auto", None, whole.append)
        thread = threading.Thread(target=post.serve, daemon=True)
        thread.start()
        begun.append(Sending(post, thread, whole))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[PiecePosition]:
    """Which pieces the coordinator has sent, and how often."""
    counted: Counter[PiecePosition] = Counter()
    original = files.piece

    def count(place: PiecePosition, data: bytes) -> list[Any]:
        counted[place] += 1
        return original(place, data)

    monkeypatch.setattr(files, "piece", count)
    return counted


def fetch(me: Worker, folder: Path, on_course: Callable[[Course], None] = lambda _: None) -> Fetcher:
    fetcher = Fetcher(me, folder, "auto", on_course=on_course)
    fetcher.fetch()
    return fetcher


def assert_same(folder: Path, model: dict[str, Path]) -> None:
    assert {path.name for path in folder.iterdir()} == set(model)
    assert all((folder / name).read_bytes() == path.read_bytes() for name, path in model.items())


def test_a_transfer_gives_equal_files(
    send: Callable[[], Sending], model: dict[str, Path], sent: Counter[PiecePosition], tmp_path: Path
) -> None:
    sending, folder, courses = send(), tmp_path / "deep" / "worker", list[Course]()
    fetcher = fetch(member("shelf"), folder, courses.append)
    assert_same(folder, model)
    assert set(sent.values()) == {1}, "each piece once"
    assert fetcher.me.code is None
    assert read_coordinator("test").workers == {"shelf": fetcher.me.keys.public}
    assert courses[-1] == Course("fetching", fetcher._sent.nbytes, fetcher._sent.nbytes, 0)  # type: ignore[union-attr]
    sending.thread.join(30)
    assert not sending.thread.is_alive() and sending.whole == ["shelf"], "all that belong to the cluster have it"
    sent.clear()
    send()
    again = fetch(fetcher.me, folder)
    assert again.is_whole and not sent, "what is whole is not fetched again"


def test_main_may_come_later(send: Callable[[], Sending], model: dict[str, Path], tmp_path: Path) -> None:
    me, folder = member("shelf"), tmp_path / "worker"
    with ThreadPoolExecutor(1) as others:
        fetching = others.submit(fetch, me, folder)
        send()
        fetching.result(60)
    assert_same(folder, model)


def test_an_interrupted_one_goes_on(
    send: Callable[[], Sending], model: dict[str, Path], sent: Counter[PiecePosition], tmp_path: Path
) -> None:
    folder, first = tmp_path / "worker", send()
    kept: list[int] = []

    def stop(course: Course) -> None:
        if course.what == "fetching" and course.done:
            kept.append(course.done)
            fetcher.end()

    fetcher = Fetcher(member("shelf"), folder, "auto", on_course=stop)
    fetcher.fetch()
    assert not fetcher.is_whole
    assert [path.name for path in folder.iterdir()] == ["model.safetensors.part"], "nothing is taken for whole"
    first.end()
    sent.clear()
    send()
    courses: list[Course] = []
    fetch(fetcher.me, folder, courses.append)
    assert_same(folder, model)
    assert sent.total() * PIECE_BYTES >= courses[-1].total - kept[-1] > sent.total() * PIECE_BYTES - 3 * PIECE_BYTES
    assert courses[-1].skipped == kept[-1] > 0


def test_what_was_damaged_meanwhile_is_fetched_again(
    send: Callable[[], Sending], model: dict[str, Path], sent: Counter[PiecePosition], tmp_path: Path
) -> None:
    """The second chunk has a byte flipped, the third is cut short."""
    folder = tmp_path / "worker"
    folder.mkdir()
    content = bytearray(model["model.safetensors"].read_bytes()[: 3 * CHUNK_BYTES - 5])
    content[CHUNK_BYTES + 7] ^= 1
    (folder / "model.safetensors.part").write_bytes(content)
    (folder / "config.json.part").write_bytes(bytes(1000))
    (folder / "experts.int4.smoe.part").write_bytes(model["experts.int4.smoe"].read_bytes())
    send()
    fetch(member("shelf"), folder)
    assert_same(folder, model)
    assert {(place.file, place.piece // PIECES) for place in sent} == {(0, 1), (0, 2), (0, 3), (2, 0)}


@pytest.mark.parametrize("times", [1, 2, 100])
def test_a_flipped_byte_is_not_kept(
    times: int, send: Callable[[], Sending], model: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, flipped = files.piece, list[PiecePosition]()

    def flip(place: PiecePosition, data: bytes) -> list[Any]:
        if place == PiecePosition(0, PIECES + 3) and len(flipped) < times:
            flipped.append(place)
            data = data[:100] + bytes([data[100] ^ 1]) + data[101:]
        return original(place, data)

    monkeypatch.setattr(files, "piece", flip)
    send()
    folder = tmp_path / "worker"
    if times < 3:
        fetch(member("shelf"), folder)
        assert_same(folder, model)
        assert len(flipped) == times
        return
    with pytest.raises(ClusterError, match=r"chunk 1 of model.safetensors arrived damaged 3 times"):
        fetch(member("shelf"), folder)
    assert len(flipped) == 3
    assert "model.safetensors" not in [path.name for path in folder.iterdir()]
    part = (folder / "model.safetensors.part").read_bytes()
    assert part[CHUNK_BYTES : 2 * CHUNK_BYTES].strip(b"\0") == b"", "not a byte of it was written"


def test_a_disk_that_forgets_is_noticed(
    send: Callable[[], Sending], model: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that were verified and written are read once more before the file gets its name."""
    from smoe.cluster import received_files

    original, lost = received_files._write_at, list[int]()

    def lose(file: Any, data: Any, offset: int) -> int:
        if offset == CHUNK_BYTES and not lost:
            lost.append(offset)
            data = bytes(len(data))
        return original(file, data, offset)

    monkeypatch.setattr(received_files, "_write_at", lose)
    send()
    fetch(member("shelf"), tmp_path / "worker")
    assert lost
    assert_same(tmp_path / "worker", model)


def test_a_stranger_gets_nothing(send: Callable[[], Sending], sent: Counter[PiecePosition], tmp_path: Path) -> None:
    """While somebody else is invited, so that it is heard at all."""
    invited = member("shelf")
    stranger = Worker("test", "thief", invited.address, invited.main_key, KeyPair.new(), "a code")
    send()
    with pytest.raises(ClusterError, match="its invitation is unknown"):
        fetch(stranger, tmp_path / "thief")
    assert not sent and not (tmp_path / "thief").exists()
    coordinator = read_coordinator("test")
    assert not coordinator.workers
    store_coordinator(Coordinator(coordinator.name, coordinator.address, coordinator.keys))
    assert not Admission(read_coordinator("test")).may_connect(stranger.keys.public), "nobody is expected any more"


def test_too_little_disk_is_refused_before(
    send: Callable[[], Sending], sent: Counter[PiecePosition], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=(1 << 30) + 4 * CHUNK_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    send()
    with pytest.raises(DiskSpaceError, match=r"fetching 3 files into .* needs 16\.0 MiB"):
        fetch(member("shelf"), tmp_path / "worker")
    assert not sent and not list((tmp_path / "worker").iterdir())


def test_a_file_of_the_users_is_not_touched(
    send: Callable[[], Sending], sent: Counter[PiecePosition], tmp_path: Path
) -> None:
    folder = tmp_path / "worker"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"x" * 77)
    send()
    with pytest.raises(ClusterError, match=r"differs from the coordinator's file; delete it"):
        fetch(member("shelf"), folder)
    assert (folder / "config.json").read_bytes() == b"x" * 77
    assert not sent


def test_two_do_not_write_to_one_folder(send: Callable[[], Sending], model: dict[str, Path], tmp_path: Path) -> None:
    from smoe.cluster.received_files import ReceivedFiles

    manifest = Manifest([SentFile("config.json", 5, "a" * 64, bytes(32))])
    first = ReceivedFiles(tmp_path / "worker", manifest)
    with pytest.raises(ClusterError, match="another process is fetching into"):
        ReceivedFiles(tmp_path / "worker", manifest)
    first.close()
    ReceivedFiles(tmp_path / "worker", manifest).close()


class Dealer:
    """A connection to a coordinator that the test plays."""

    def __init__(self) -> None:
        self.asked: list[frames.Frame] = []
        self.answers: list[list[Any]] = []
        self.is_connected = True

    def poll(self, _: int) -> int:
        return len(self.answers)

    def send_multipart(self, parts: list[Any], *_: Any) -> None:
        if not self.is_connected:
            raise zmq.Again
        self.asked.append(frames.parse([bytes(part) for part in parts]))

    def recv_multipart(self, copy: bool = True) -> list[Any]:
        class Part:
            def __init__(self, data: bytes) -> None:
                self.buffer = memoryview(data)

        return [Part(bytes(part)) for part in self.answers.pop(0)]

    def take(self) -> list[FrameKind]:
        kinds = [frame.kind for frame in self.asked]
        self.asked.clear()
        return kinds


@pytest.fixture
def me(coordinator: Coordinator) -> Worker:
    return Worker("test", "shelf", coordinator.address, coordinator.keys.public, KeyPair.new())


def test_it_greets_a_silent_main_again_and_asks_for_what_has_not_come(me: Worker, tmp_path: Path) -> None:
    now, dealer, words = [0.0], Dealer(), list[str]()
    fetcher = Fetcher(me, tmp_path / "worker", "auto", on_change=words.append, clock=lambda: now[0])
    fetcher.turn(dealer)  # type: ignore[arg-type]
    assert dealer.take() == [FrameKind.FILES]
    manifest = Manifest([SentFile("a.gguf", 3 * PIECE_BYTES, "a" * 64, bytes(32))])
    dealer.answers = [files.manifest(manifest)]
    fetcher.turn(dealer)  # type: ignore[arg-type]
    assert [files.parse_place(each, manifest).piece for each in dealer.asked] == [0, 1, 2]
    dealer.take()
    now[0] = 0.5
    dealer.answers = [files.piece(PiecePosition(0, 1), bytes(PIECE_BYTES))]
    fetcher.turn(dealer)  # type: ignore[arg-type]
    assert dealer.take() == [], "all are under way"
    now[0] = 1.6
    fetcher.turn(dealer)  # type: ignore[arg-type]
    assert frames.fields_of(dealer.asked[0])["known"] == manifest.mark
    dealer.take()
    dealer.answers = [frames.alone(FrameKind.SAME)]
    fetcher.turn(dealer)  # type: ignore[arg-type]
    assert sorted(files.parse_place(each, manifest).piece for each in dealer.asked) == [0, 2]
    now[0] = 10.0
    fetcher.turn(dealer)  # type: ignore[arg-type]
    assert words == ["is known to the coordinator", "lost the coordinator; waiting for it"]
    fetcher._let_go()


def test_it_greets_as_soon_as_there_is_a_connection(me: Worker, tmp_path: Path) -> None:
    dealer = Dealer()
    dealer.is_connected = False
    fetcher = Fetcher(me, tmp_path / "worker", "auto", clock=lambda: 0.0)
    fetcher.turn(dealer)  # type: ignore[arg-type]
    dealer.is_connected = True
    fetcher.turn(dealer)  # type: ignore[arg-type]
    assert dealer.take() == [FrameKind.FILES], "no time has passed"
    fetcher.turn(dealer)  # type: ignore[arg-type]
    assert dealer.take() == []


def test_files_are_compared_once_where_the_same_list_comes_twice(me: Worker, tmp_path: Path) -> None:
    dealer, courses = Dealer(), list[Course]()
    fetcher = Fetcher(me, tmp_path / "worker", "auto", on_course=courses.append)
    sent = files.manifest(Manifest([SentFile("a.gguf", 2 * PIECE_BYTES, "a" * 64, bytes(32))]))
    dealer.answers = [sent]
    fetcher.turn(dealer)  # type: ignore[arg-type]
    assert dealer.take() == [FrameKind.PIECE, FrameKind.PIECE]
    dealer.answers = [files.piece(PiecePosition(0, 1), bytes(PIECE_BYTES)), sent]
    fetcher.turn(dealer)  # type: ignore[arg-type]
    assert len(courses) == 1
    assert [frame.request for frame in dealer.asked] == [0], "1 has come"
    fetcher._let_go()


def test_it_asks_no_faster_than_its_rate(me: Worker, tmp_path: Path) -> None:
    now, dealer = [0.0], Dealer()
    fetcher = Fetcher(me, tmp_path / "worker", "auto", 4 * PIECE_BYTES, clock=lambda: now[0])
    manifest = Manifest([SentFile("a.gguf", CHUNK_BYTES, "a" * 64, bytes(32))])
    dealer.answers = [files.manifest(manifest)]
    asked = []
    for tenth in range(9):
        now[0] = tenth / 8
        fetcher.turn(dealer)  # type: ignore[arg-type]
        asked.append(dealer.take().count(FrameKind.PIECE))
    assert asked == [1, 0, 1, 0, 1, 0, 1, 0, 1]
    fetcher._let_go()


@pytest.mark.parametrize(
    "answer",
    [
        [b"garbage"],
        [*frames.alone(FrameKind.MANIFEST), b'[["../x.gguf", 5, "' + b"a" * 64 + b'"]]', bytes(32)],
        [*frames.alone(FrameKind.MANIFEST), b"[]", b""],
    ],
)
def test_a_main_that_lies_is_left(answer: list[bytes], me: Worker, tmp_path: Path) -> None:
    dealer = Dealer()
    dealer.answers = [answer]
    fetcher = Fetcher(me, tmp_path / "worker", "auto")
    with pytest.raises(ClusterError, match="the coordinator sent an invalid message"):
        fetcher.turn(dealer)  # type: ignore[arg-type]
    assert not (tmp_path / "worker").exists()


def test_a_window_is_smaller_than_what_main_hears() -> None:
    from smoe.cluster import sending

    assert fetching.MOST_UNDER_WAY <= sending._MOST_ASKED
