"""Two seconds of clients who come and go. Would catch a text that goes on for nobody, a file or a thread that is left
of a client that has vanished, a client that gets no answer, or another one than alone. `python -m bench.serve.soak`
takes an hour, and looks at memory too."""

from __future__ import annotations

import os
from typing import Any

import pytest

from bench.serve.soak import Soak
from bench.serve.visitors import Visitor
from tests.server.conftest import Running, served


@pytest.fixture
def soak(demo: Any, demo_tokenizer: Any) -> Any:
    with served(demo, demo_tokenizer, max_waiting=4) as running:
        yield Soak(int(running.url.rsplit(":", 1)[1]), os.getpid(), "demo", 4, 1)


def test_clients_who_come_and_go_leave_nothing_behind(soak: Soak) -> None:
    soak.run(2.0, 1.0)
    ended = soak.end()
    assert not soak.problems(ended, {"rss": 0.0, "own": 0.0})
    assert soak.visits and soak.looks, "how many there are of either is the machine's affair"
    assert soak.first and ended["is_text_equal"]


def test_every_visit_is_answered_as_it_should_be(soak: Soak) -> None:
    for visit in Visitor.VISITS:
        came = soak.come(soak.visitor(0), visit)
        assert came in (
            "left",
            "stayed",
            "went on",
            "streamed",
            "status 200",
            "status 400",
            "vanished",
            "status 413",
            "well",
        ), visit
    assert soak.visits["asks_with_tools: status 400"] == 1, "the embedded model has no place for tools"


def test_what_is_left_behind_is_found(soak: Soak) -> None:
    soak._find("whole", "status 500: x")
    ended = {
        "left": {"running": 1, "waiting": 0},
        "before": soak.before._asdict(),
        "after": soak.before._replace(files=soak.before.files + 1, threads=1000)._asdict(),
        "is_text_equal": False,
    }
    found = "\n".join(soak.problems(ended, {"rss": 0.021, "own": -0.05}))
    for words in (
        "whole: status 500",
        "rss has grown by 2.1%",
        "own has",
        "1 running",
        "another text",
        "files",
        "1000 th",
    ):
        assert words in found


def test_an_error_of_the_servers_own_is_found(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Soak(int(running.url.rsplit(":", 1)[1]), os.getpid(), "demo", 1, 1)
    monkeypatch.setattr(running.serving, "read", lambda *_: 1 / 0)
    assert found.come(found.visitor(0), "whole") == "wrong"
    assert "status 500" in found.found[0]["what"]
