"""A draft on a machine of its own: it names what one on the coordinator would name, and the text is the same whatever
it does.

Would catch: a draft that is behind after a prompt, or follows another text; memory for a draft on a coordinator that
has none; a coordinator that waits for one that is gone, or believes what cannot be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.cluster.draft_frames import ExpectedExperts
from smoe.cluster.draft_process import DraftProcess
from smoe.cluster.stored_identity import read_coordinator, store_coordinator
from smoe.errors import ClusterError, ConfigError
from smoe.load.remote_draft import DraftFiles
from smoe.policy.prediction import Prediction
from smoe.runtime.draft_model import Greedy
from tests import oracle, zoo
from tests.cluster.conftest import BY_TURNS, GiveUpWhen, cluster_of, member, served_or_refused
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]
Start = Callable[..., list[Any]]
Shade = Callable[..., Any]
PROMPT = oracle.PROMPT[0].tolist()
APART: dict[str, Any] = {"cluster": "test", "prefetch": "draft-model", "draft_on": "cluster", "prefetch_trial": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = zoo.save("mixtral", tmp_path_factory.mktemp("packed"), dtype=torch.bfloat16)
    pack_folder(folder, precision="int4")
    return folder


@pytest.fixture
def shade(coordinator: Any) -> Iterator[Shade]:
    """`shade(folder, kind=DraftProcess)`: an invited draft, on a thread of its own."""
    running: list[tuple[DraftProcess, threading.Thread]] = []

    def begin(folder: Path, kind: type[DraftProcess] = DraftProcess, name: str = "s0") -> DraftProcess:
        process = kind(member(name), DraftFiles(folder, threads=1), print)
        thread = threading.Thread(target=partial(served_or_refused, process), daemon=True)
        thread.start()
        running.append((process, thread))
        return process

    yield begin
    for process, _ in running:
        process.end()
    for _, thread in running:
        thread.join(20)
        assert not thread.is_alive()


def until(is_so: Callable[[], Any], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(0.005)
    return bool(found)


class Heard:
    """A listener that remembers what it was last told of every place, and passes on."""

    def __init__(self, cluster: Any) -> None:
        self.said: dict[tuple[int, int], tuple[int, ...]] = {}
        self._cluster = cluster

    def expect(self, position: int, named: Prediction) -> None:
        self.said[position, named.layer] = tuple(named.experts)
        self._cluster.expect(position, named)

    def withdraw(self, position: int) -> None:
        self.said = {place: experts for place, experts in self.said.items() if place[0] < position}
        self._cluster.withdraw(position)


def listened(model: PreTrainedModel) -> Heard:
    """An observer of the draft model's predictions, in addition to the cluster."""
    heard: Any = Heard(cluster_of(model))
    model.offload.executor.helpers[-1].send_to(heard)
    return heard


@pytest.mark.parametrize("preset", [{}, BY_TURNS | {"prefetch": "draft-model"}], ids=["finish", "by turns"])
def test_the_text_is_exact(preset: dict[str, Any], folder: Path, start: Start, shade: Shade, open_model: Open) -> None:
    start(folder, 2)
    shade(folder)
    model = open_model(folder, "minimum", cluster_workers=2, **(APART | preset))
    assert until(lambda: cluster_of(model).draft["state"] == "ready"), cluster_of(model).draft
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    said = cluster_of(model).draft
    assert said["name"] == "s0" and said["precision"] == "int4"
    assert said["tokens_followed"] > oracle.NEW_TOKENS // 2 and said["layers_named"] > oracle.NEW_TOKENS
    assert "draft model" not in model.offload.ledger.entries(), "main has no memory for one"


@pytest.mark.parametrize(("departure", "part_bytes"), [("late", 1 << 17), ("late", 900), ("at-once", 1 << 17)])
def test_it_names_what_one_on_main_would_name(
    departure: str,
    part_bytes: int,
    folder: Path,
    start: Start,
    shade: Shade,
    open_model: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a prompt, token by token, after another prompt behind them, and taken back; also where keys and values
    come a few positions at a time."""
    monkeypatch.setattr("smoe.cluster.following.PART_BYTES", part_bytes)
    start(folder, 1)
    shade(folder)
    spares = {"draft_start": departure, "draft_extra": 1}
    apart = named_along(open_model(folder, "minimum", **APART, **spares))
    assert apart == named_along(open_model(folder, "minimum", **APART | {"draft_on": "coordinator"}, **spares))


def named_along(model: PreTrainedModel) -> list[list[tuple[int, ...]]]:
    """What is named of every layer of tokens decoded after prompts, and after prompts in the place of others."""
    heard, text, layers = listened(model), Greedy(model), range(len(model.offload.store.layers))
    found: list[list[tuple[int, ...]]] = []

    def step(token: int) -> None:
        text.take([token])
        here = text.cache.length - 1
        assert until(lambda: sum(place[0] == here for place in heard.said) == len(layers)), heard.said
        found.append([heard.said[here, layer] for layer in layers])

    text.read(PROMPT)
    for _ in range(4):
        step(text.next_token)
    text.take(PROMPT[:7])
    step(text.next_token)
    text.cache.rewind(len(PROMPT) - 5)
    text.take(PROMPT[3:9])
    for token in (7, 8, 9):
        step(token)
    text.read(PROMPT[::-1])
    step(5)
    model.offload.close()
    return found


def test_a_draft_that_is_lost_is_taken_back(folder: Path, start: Start, shade: Shade, open_model: Open) -> None:
    """Killed in the middle of a text, and another one in its place: the text goes on."""
    start(folder, 1)
    first = shade(folder, type("Killed", (DraftProcess,), {"_send": silenced}))
    model = open_model(folder, "minimum", **APART)
    cluster, text, alone = cluster_of(model), Greedy(model), Greedy(open_model(folder, "minimum"))
    text.read(PROMPT)
    alone.read(PROMPT)
    for n in range(24):
        if n == 6:
            assert cluster.draft["tokens_followed"] > 0
            first.is_silent = True
            first.end()
        if n == 12:
            assert until(lambda: cluster.draft["state"] == "out") and cluster.draft["why"]
            shade(folder, name="s1")
            assert until(lambda: cluster.draft["state"] == "ready" and cluster.draft["name"] == "s1")
            before = cluster.draft["layers_named"]
        assert text.next_token == alone.next_token
        text.take([text.next_token])
        alone.take([alone.next_token])
    assert until(lambda: cluster.draft["layers_named"] > before), "it was told all that it had not heard"


def silenced(self: Any, dealer: Any, parts: list[Any]) -> bool:
    """In the place of `Talking._send`: a process that was killed says no good-bye."""
    return getattr(self, "is_silent", False) or DraftProcess._send(self, dealer, parts)


class Frozen(DraftProcess):
    """Sleeps for a while, once, when it is told to."""

    asleep = 0.0

    def _turn(self, dealer: Any) -> None:
        time.sleep(vars(self).pop("asleep", 0.0))
        super()._turn(dealer)


def test_a_draft_that_was_frozen_comes_back(folder: Path, start: Start, shade: Shade, open_model: Open) -> None:
    start(folder, 1)
    frozen = shade(folder, Frozen)
    model = open_model(folder, "minimum", **APART)
    cluster = cluster_of(model)
    frozen.asleep = 1.6
    assert until(lambda: cluster.draft["state"] == "out") and "sent nothing for 1 s" in cluster.draft["why"]
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=6), oracle.greedy(oracle.reference(folder), new_tokens=6))
    assert until(lambda: cluster.draft["state"] == "ready")
    followed = cluster.draft["tokens_followed"]
    oracle.greedy(model, new_tokens=6)
    assert cluster.draft["tokens_followed"] > followed


def test_a_draft_that_has_missed_something_begins_anew(
    folder: Path, start: Start, shade: Shade, open_model: Open
) -> None:
    start(folder, 1)
    draft = shade(folder)
    model = open_model(folder, "minimum", **APART)
    cluster, heard, text = cluster_of(model), listened(model), Greedy(model)
    text.read(PROMPT)
    text.take([7])
    draft._opened[1]._text = None
    text.take([8])
    assert until(lambda: "reconnected" in cluster.draft["why"] or draft._opened[1]._text is not None)
    text.take([9])
    here = text.cache.length - 1
    assert until(lambda: (here, len(model.offload.store.layers) - 1) in heard.said)
    assert cluster.draft["state"] == "ready"


class Liar(DraftProcess):
    """Names other experts than its routers do, or says what cannot be."""

    lie: Callable[[ExpectedExperts], ExpectedExperts]

    def _hear_draft(self, step: Any, expected: Any) -> None:
        super()._hear_draft(step, expected)
        with self._lock:
            self._unsent = [type(self).lie(each) for each in self._unsent]


LIES: dict[str, tuple[Callable[[ExpectedExperts], ExpectedExperts], bool]] = {
    "other experts": (lambda said: said._replace(experts=tuple((n + 3) % 8 for n in said.experts)), True),
    "another token": (lambda said: said._replace(token=said.token + 1), True),
    "another place": (lambda said: said._replace(position=said.position + 1), True),
    "no layer": (lambda said: said._replace(layer=99), False),
    "no experts": (lambda said: said._replace(experts=(97, 98)), False),
    "twice the same": (lambda said: said._replace(experts=(1, 1)), False),
    "too many": (lambda said: said._replace(experts=(0, 1, 2, 3)), False),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_liar_says_changes_no_bit(
    lie: str, folder: Path, start: Start, shade: Shade, open_model: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    start(folder, 2)
    says, is_believed = LIES[lie]
    shade(folder, type("Lying", (Liar,), {"lie": staticmethod(says)}))
    model = open_model(folder, "minimum", cluster_workers=2, **APART)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    said = cluster_of(model).draft
    if is_believed:
        assert said["state"] == "ready"
    else:
        assert said["state"] == "out" and "sent an invalid message" in said["why"], said


@pytest.mark.parametrize("parts", [[b"garbage", b"more"], [b""], [bytes(20)]], ids=["noise", "nothing", "zeros"])
def test_garbage_is_refused_by_name(
    parts: list[bytes], folder: Path, start: Start, shade: Shade, open_model: Open
) -> None:
    start(folder, 1)
    draft = shade(folder)
    model = open_model(folder, "minimum", **APART)
    draft._queue.put(parts)
    assert until(lambda: cluster_of(model).draft["state"] == "out")
    assert "sent an invalid message" in cluster_of(model).draft["why"]
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=4), oracle.greedy(oracle.reference(folder), new_tokens=4))


def test_what_cannot_be_opened_is_said_and_not_waited_for(
    folder: Path, start: Start, shade: Shade, open_model: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    start(folder, 1)
    shade(folder)
    began = time.monotonic()
    model = open_model(folder, "minimum", draft_precision="int8", cluster_timeout_seconds=60.0, **APART)
    assert time.monotonic() - began < 30
    assert "needs its experts packed" in cluster_of(model).draft["why"]
    said = "cannot load what the coordinator requests: a draft model in int8 needs its experts packed"
    assert until(lambda: said in capsys.readouterr().out)
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=4), oracle.greedy(oracle.reference(folder), new_tokens=4))


def test_another_model_s_draft_is_refused(
    folder: Path, start: Start, shade: Shade, open_model: Open, toy: Any, give_up_when: GiveUpWhen
) -> None:
    start(folder, 1)
    other = shade(toy("qwen3_moe", dtype=torch.bfloat16))
    give_up_when(lambda cluster: other._queue.fileno() < 0 and cluster._here_now())  # it has ended
    model = open_model(folder, "minimum", **APART)
    assert cluster_of(model).draft is None
    with pytest.raises(ClusterError, match="its weights is"):
        other.serve()


def test_it_is_used_where_one_belongs_to_the_cluster(
    folder: Path, start: Start, shade: Shade, open_model: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    """A coordinator that was not told where, and knows of none, has a thread of its own; the next one knows."""
    start(folder, 1)
    switches = {name: value for name, value in APART.items() if name != "draft_on"}
    before = open_model(folder, "minimum", **switches)
    assert before.offload.config.draft_on == "coordinator" and "draft model" in before.offload.ledger.entries()
    shade(folder)
    assert until(lambda: cluster_of(before).draft is not None)
    assert cluster_of(before).draft["state"] == "not used" and read_coordinator("test").drafts == ["s0"]
    assert until(lambda: "waits: this coordinator decodes without a draft model" in capsys.readouterr().out)
    before.offload.close()
    after = open_model(folder, "minimum", **switches)
    assert after.offload.config.draft_on == "cluster" and cluster_of(after).draft["state"] == "ready"
    second = shade(folder, name="s2")
    assert until(lambda: "s0 is already the coordinator's draft model" in capsys.readouterr().out)
    assert cluster_of(after).draft["name"] == "s0" and second._opened is None
    after.offload.close()
    store_coordinator(read_coordinator("test").with_role("s0", False).with_role("s2", False))
    assert open_model(folder, "minimum", **switches).offload.config.draft_on == "coordinator"


def test_what_main_wants_anew_is_opened_anew(folder: Path, start: Start, shade: Shade, open_model: Open) -> None:
    """And what is open already stays for the next coordinator."""
    start(folder, 1)
    draft = shade(folder)
    opened = []
    for departure in ("late", "late", "at-once"):
        model = open_model(folder, "minimum", draft_start=departure, **APART)
        assert cluster_of(model).draft["state"] == "ready"
        opened.append(draft._opened[1])
        oracle.greedy(model, new_tokens=3)
        model.offload.close()
    assert opened[0] is opened[1] is not opened[2] and opened[0]._ahead._draft.text.engine._is_closed


def test_settings_of_a_place(folder: Path, open_model: Open) -> None:
    with pytest.raises(ConfigError, match="`draft_on` has an effect only with `cluster`"):
        open_model(folder, "minimum", prefetch="draft-model", draft_on="cluster")
    with pytest.raises(ConfigError, match="`draft_on` has an effect only with `prefetch=draft-model`"):
        open_model(folder, "minimum", draft_on="coordinator")
    with pytest.raises(ConfigError, match="coordinator, cluster"):
        open_model(folder, "minimum", prefetch="draft-model", draft_on="moon")
