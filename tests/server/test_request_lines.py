"""What the log says of requests, and what a server says of all of them. Would catch a line per token, a client that
writes lines of its own, numbers that are not those of the answer."""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import Any

import pytest

from smoe.errors import TransferError
from smoe.generation.sampler import Sampler
from smoe.server.totals import totals_of
from tests.server.conftest import ENDLESS, Running, eventually, served

TOKENS = 12


def _answers(running: Running) -> Counter[tuple[str, ...]]:
    return Counter({labels: int(n) for labels, n in running.serving.meters.count("smoe_http_requests").items()})


def test_one_line_says_how_it_went(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "smoe.server")
    usage = running.chat(max_tokens=TOKENS, logit_bias=ENDLESS).usage
    reused = usage.prompt_tokens_details.cached_tokens
    eventually(lambda: bool(caplog.messages))
    (line,) = caplog.messages
    assert re.fullmatch(
        rf"POST /v1/chat/completions 200 \d+\.\d\ds prompt={usage.prompt_tokens} reused={reused} new={TOKENS} "
        r"first=\d+\.\d\ds rate=[\d.]+/s ended=length",
        line,
    )
    caplog.clear()
    list(running.chat(max_tokens=TOKENS, stream=True, n=2, stop="zzz", logit_bias=ENDLESS))
    eventually(lambda: bool(caplog.messages))
    assert f" new={2 * TOKENS} " in caplog.messages[0] and f" prompt={usage.prompt_tokens} " in caplog.messages[0]
    caplog.clear()
    running.http("GET", "/nowhere%0aGET%20/secret%20200")
    eventually(lambda: bool(caplog.messages))
    assert re.fullmatch(r"GET '/nowhere\\nGET /secret 200' 404 \d+\.\d\ds", caplog.messages[0])


def test_a_client_that_leaves_is_told_from_an_answer(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "smoe.server")
    stream = running.chat(max_tokens=300, logit_bias=ENDLESS, stream=True)
    next(iter(stream))
    stream.close()
    eventually(lambda: bool(caplog.messages))
    assert caplog.messages[0].endswith("ended=client_gone")


def test_a_stream_that_fails_has_its_status(
    running: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sampler: Sampler, logits: Any) -> Any:
        raise TransferError("a block could not be read")

    monkeypatch.setattr(Sampler, "choose", fail)
    caplog.set_level(logging.INFO, "smoe.server.request_lines")
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": True}
    before = _answers(running)
    assert running.http("POST", "/v1/chat/completions", body).status == 200
    assert _answers(running) - before == {("/v1/chat/completions", "500"): 1}, "the metrics are those of the log"
    eventually(lambda: caplog.messages[-1:] != [] and caplog.messages[-1].startswith("POST"))
    assert caplog.messages[-1].startswith("POST /v1/chat/completions 500 ")
    assert caplog.messages[-1].endswith("ended=failed")


def test_a_stream_whose_client_leaves_is_counted(running: Running) -> None:
    before = _answers(running)
    stream = running.chat(max_tokens=300, logit_bias=ENDLESS, stream=True)
    next(iter(stream))
    stream.close()
    eventually(lambda: _answers(running) - before == {("/v1/chat/completions", "200"): 1})


def test_nobody_asks_no_line_is_made(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "smoe.server")
    assert running.chat().choices
    eventually(lambda: running.serving.running == 0)
    assert not caplog.messages


def test_totals_are_the_sums_of_answers(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer) as running:
        usages = [running.chat(max_tokens=TOKENS, logit_bias=ENDLESS).usage for _ in range(3)]
        assert running.http("POST", "/v1/chat/completions", {"model": "demo"}).status == 400
        for path in ("completions", "messages", "responses"):
            assert running.http("POST", f"/v1/{path}", {"model": "demo"}).status == 400
        assert running.http("POST", "/v1/messages/count_tokens", {"model": "demo"}).status == 400
        for path in ("/health", "/metrics", "/", "/v1/models", "/v1/models/demo"):
            assert running.http("GET", path).status == 200
        assert running.http("POST", "/v1/nowhere", {}).status == running.http("GET", "/v1/models/x").status == 404
        assert running.http("POST", "/v1/embeddings", {"model": "demo", "input": "x"}).status == 501
        running.serving.meters.answers.labels("/v1/completions", 499).inc(2)
        eventually(lambda: running.serving.running == 0)
    totals = totals_of(running.serving)
    assert (totals.requests, totals.answered_requests, totals.refused_requests, totals.failed_requests) == (9, 3, 4, 0)
    assert totals.other_requests == 9, (
        "token counts, paths of the page and of probes, models, unknown paths, embeddings"
    )
    assert totals.abandoned_requests == 2
    assert running.serving.meters.count("smoe_http_requests")["/v1/models/{name}", "404"] == 1
    assert totals.new_tokens == 3 * TOKENS
    assert totals.prompt_tokens == sum(usage.prompt_tokens for usage in usages)
    assert totals.reused_tokens == sum(usage.prompt_tokens_details.cached_tokens for usage in usages) > 0
    assert totals.tokens_per_second is not None and totals.tokens_per_second > 0
    assert totals.as_json()["tokens_per_second"] == totals.tokens_per_second
