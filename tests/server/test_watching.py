"""What the page is told: the shape of the events, who is told what, when nobody is; the page's own files.

Would catch a look that is told twice to who came late, an engine that is watched for nobody, a page that a strict
policy would not run, a stream that keeps a server from ending.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smoe.report.watched import EVENTS, TIERS
from smoe.server.run_page import shown
from smoe.server.watching import HEADERS, PAGE
from tests import oracle
from tests.server.conftest import PATIENCE_SECONDS, Running, eventually, served

FILES = sorted(path.name for path in PAGE.iterdir())


class TextEvent:
    """What one of those who look is told, as it comes."""

    def __init__(self, url: str, **headers: str) -> None:
        self.told: list[tuple[str, Any]] = []
        self.has_ended = False
        self._line = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
        self._line.request("GET", "/watch", headers=headers)
        self._socket = self._line.sock
        self.answer = self._line.getresponse()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        name = ""
        try:
            for line in iter(self.answer.readline, b""):
                text = line.decode().rstrip("\n")
                if text.startswith("event: "):
                    name = text.removeprefix("event: ")
                elif text.startswith("data: "):
                    self.told.append((name, json.loads(text.removeprefix("data: "))))
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            pass  # left
        self.has_ended = True

    def looks(self) -> list[dict[str, Any]]:
        return [value for name, value in self.told if name == "look"]

    def sum(self, name: str) -> int:
        return sum(sum(look.get(name, [])[1::2]) for look in self.looks())

    def running(self) -> int:
        """As last said: looks have what has changed."""
        said: list[int] = [look["running"] for look in self.looks() if "running" in look]
        return said[-1]

    def tiers(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for look in self.looks():
            pairs = look.get("tiers", [])
            found |= dict(zip(pairs[::2], pairs[1::2], strict=True))
        return {number: tier for number, tier in found.items() if tier}

    def leave(self) -> None:
        """As somebody does who closes the page."""
        if not self.has_ended:
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_SECONDS)
        self.answer.close()
        self._line.close()


@pytest.fixture
def on_event(running: Running) -> Iterator[TextEvent]:
    found = TextEvent(running.url)
    eventually(lambda: len(found.told) >= 2)
    yield found
    found.leave()


def test_what_does_not_change_comes_first(on_event: TextEvent, running: Running) -> None:
    assert on_event.answer.headers["content-type"].startswith("text/event-stream")
    (first, model), (second, look) = on_event.told[:2]
    engine = running.serving.engine
    assert (first, second) == ("model", "look")
    assert model["name"] == "demo" and model["talks"] == "chat" and model["context"] == engine.context_tokens
    assert model["remark"].startswith("demo is a toy") and model["most_slots"] == engine.ledger.most_slots
    assert sum(experts for _, experts in model["layers"]) == engine.ledger.demand.total_experts
    assert model["memory"] == engine.ledger.entries() and model["budget"] == engine.ledger.budget_bytes
    assert tuple(model["tiers"]) == TIERS and tuple(model["events"]) == EVENTS
    assert look["running"] == look["waiting"] == 0


def test_a_text_is_told_as_it_is_written(on_event: TextEvent, running: Running) -> None:
    engine = running.serving.engine
    before = engine.stats()
    asking = threading.Thread(target=running.chat, kwargs={"max_tokens": 300, "logit_bias": {"0": -100}})
    asking.start()
    eventually(
        lambda: any(look.get("running") == 1 for look in on_event.looks())
    )  # looks are due ten times a second, and it does not end itself
    asking.join()
    eventually(lambda: on_event.running() == 0)
    time.sleep(0.3)
    counted = engine.stats() - before
    assert on_event.sum("used") == counted.decode_uses + counted.prefill_uses
    assert counted.loads <= on_event.sum("read") <= counted.loads + counted.prefetches
    ready, staged = engine.executor.table.ready, engine.executor.table.staged
    assert len(on_event.tiers()) == len(ready)
    assert sum(tier == TIERS.index("passing") for tier in on_event.tiers().values()) == len(staged)


def test_who_comes_late_is_told_how_things_stand(on_event: TextEvent, running: Running) -> None:
    running.chat(max_tokens=12)
    late = TextEvent(running.url)
    eventually(lambda: len(late.told) >= 2)
    assert not late.sum("used"), "what happened before is not its affair"
    running.chat("And then?", max_tokens=12)
    eventually(lambda: late.sum("used") > 0 and late.running() == on_event.running() == 0)
    time.sleep(0.3)
    assert late.tiers() == on_event.tiers()
    assert 0 < late.sum("used") < on_event.sum("used")
    late.leave()


def test_the_engine_is_watched_while_somebody_looks(running: Running) -> None:
    observers = running.serving.engine.executor
    eventually(lambda: observers.observers == [])
    first, second = TextEvent(running.url), TextEvent(running.url)
    eventually(lambda: len(first.told) >= 2 and len(second.told) >= 2)
    assert len(observers.observers) == 1
    first.leave()
    assert running.chat(max_tokens=2).choices
    second.leave()
    eventually(lambda: observers.observers == [])


def test_a_key_is_asked_for_and_the_page_is_there_without(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, api_key="a-key") as running:
        assert running.http("GET", "/watch").status == 401
        assert running.http("GET", "/").status == running.http("GET", "/main.js").status == 200
        found = TextEvent(running.url, Authorization="Bearer a-key")
        eventually(lambda: len(found.told) >= 2)
        found.leave()


def test_a_server_ends_although_somebody_looks(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer) as running:
        found = TextEvent(running.url)
        eventually(lambda: len(found.told) >= 2)
    eventually(lambda: found.has_ended)
    found.leave()


@pytest.mark.parametrize("name", FILES)
def test_files_come_with_a_strict_policy(name: str, running: Running) -> None:
    answer = running.http("GET", "/" if name == "index.html" else f"/{name}")
    assert answer.status == 200 and answer.text == (PAGE / name).read_text(encoding="utf8")
    for header, value in HEADERS.items():
        assert answer.headers[header] == value
    assert "unsafe" not in answer.headers["Content-Security-Policy"]


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_elsewhere_and_nothing_becomes_markup(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf8")
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    if name.endswith(".html"):
        assert not re.search(r"\sstyle=|\son[a-z]+=|<style|<script(?![^>]*\ssrc=)", text)
    for found in re.findall(r'(?:from|src=|href=) ?"\.?/?([^"]+)"', text):
        assert found in FILES, found


def test_a_run_is_shown_from_its_beginning_to_its_end(toy: Callable[..., Path], open_model: Callable[..., Any]) -> None:
    model = open_model(toy("qwen3_moe"), "half")
    with shown(model.offload, "toy") as page:
        assert not page.wait(0.05)
        found = TextEvent(page.address)
        assert page.wait(PATIENCE_SECONDS)
        page.say("Once ")
        model.generate(oracle.PROMPT, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        page.say("upon")
        late = TextEvent(page.address)
        eventually(lambda: len(late.told) >= 2)
    eventually(lambda: found.has_ended and late.has_ended)
    assert found.told[0][1]["talks"] is None
    for each in (found, late):
        assert "".join(look.get("text", "") for look in each.looks()) == "Once upon"
        assert each.looks()[-1]["over"] == 1
        each.leave()
    assert found.sum("used") == sum(vars(model.offload.stats())[f"{phase}_uses"] for phase in ("decode", "prefill"))
    assert model.offload.executor.observers == []
