"""Too many, and too late. Would catch a queue without a bound, a fault that takes others with it, an end that cuts
answers off, a server that does not end."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from smoe.errors import TransferError
from smoe.generation.rows import Rows
from smoe.generation.sampler import Sampler
from tests.server.conftest import ENDLESS, PATIENCE_SECONDS, Running, eventually, served

TOKENS = 24


@contextmanager
def held(running: Running, count: int) -> Iterator[list[Any]]:
    """So many streams under way, none of which is read."""
    places = running.serving.engine.config.max_sequences
    streams: list[Any] = []
    try:
        for number in range(1, count + 1):
            streams.append(running.chat(max_tokens=300, logit_bias=ENDLESS, stream=True))
            eventually(lambda number=number: running.serving.running == min(number, places))  # type: ignore[misc]
        yield streams
    finally:
        for stream in streams:
            stream.close()


def test_who_comes_when_all_places_are_taken_is_told_when_to_come_again(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, max_waiting=2) as running:
        with held(running, 6):
            assert (running.serving.running, running.serving.waiting) == (4, 2)
            with pytest.raises(openai.RateLimitError) as error:
                running.chat()
            assert error.value.code == "queue_full" and int(error.value.response.headers["retry-after"]) > 0
        eventually(lambda: running.serving.waiting == running.serving.running == 0)
        assert running.chat().choices


def test_what_never_has_room_is_no_matter_of_coming_again(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, max_waiting=2) as running:
        for ask in (
            lambda: running.chat(n=7),
            lambda: running.client.completions.create(model="demo", prompt=["Tom"] * 7, max_tokens=2),
        ):
            with pytest.raises(
                openai.BadRequestError, match=r"7 texts; .* at most 6 at once: 4 decoded together and a queue of 2"
            ):
                ask()
        assert running.serving.waiting == running.serving.running == 0
        assert len(running.chat(n=6).choices) == 6


def test_a_request_has_room_for_all_its_texts_or_hands_in_none(
    demo: Any, demo_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(demo, demo_tokenizer, max_waiting=2) as running, held(running, 4):
        handed_in: list[Any] = []
        monkeypatch.setattr(running.serving._loop, "hand_in", handed_in.append)
        with pytest.raises(openai.RateLimitError, match="3 texts requested, room for 2"):
            running.chat(n=3)
        assert not handed_in


def test_a_text_that_fails_fails_alone(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever step it is in: NaN for one of three, in a stream an event, in whole answers a status."""
    expected = running.chat("Tom had a dog.", max_tokens=TOKENS, logit_bias=ENDLESS).choices[0].message.content
    choose = Sampler.choose

    def fails(sampler: Sampler, logits: torch.Tensor) -> Any:
        if sampler._presence == 1.5 and sum(sampler._counts.values()) == 3:
            logits = logits.clone().fill_(float("nan"))
        return choose(sampler, logits)

    monkeypatch.setattr(Sampler, "choose", fails)
    found: dict[str, Any] = {}

    def good() -> None:
        answer = running.chat("Tom had a dog.", max_tokens=TOKENS, logit_bias=ENDLESS)
        found["good"] = answer.choices[0].message.content

    def whole() -> None:
        with pytest.raises(openai.InternalServerError) as error:
            running.chat(max_tokens=TOKENS, presence_penalty=1.5, logit_bias=ENDLESS)
        found["whole"] = error.value.code

    def stream() -> None:
        with pytest.raises(openai.APIError, match="NaN") as error:
            list(running.chat(max_tokens=TOKENS, presence_penalty=1.5, logit_bias=ENDLESS, stream=True))
        found["stream"] = error.value.code

    threads = [threading.Thread(target=each) for each in (good, whole, stream)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"good": expected, "whole": "model_error", "stream": "model_error"}
    assert running.serving.state == "ok"


def test_an_expert_that_cannot_be_read_loses_the_request_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Rows.read

    def fails(rows: Rows, row: int, ids: Any) -> Any:
        if len(ids) > 40:
            raise TransferError("cannot read /secret/place/model.safetensors")
        return read(rows, row, ids)

    monkeypatch.setattr(Rows, "read", fails)
    with pytest.raises(openai.InternalServerError) as error:
        running.chat("word " * 50)
    assert error.value.code == "read_error" and "secret" not in str(error.value)
    response = list(running.client.responses.create(model="demo", input="word " * 50, stream=True))[-1]
    assert (response.type, response.response.error.code) == ("response.failed", "server_error")
    assert running.chat().choices


def test_a_server_that_ends_lets_answers_finish(
    demo: Any, demo_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second token of the stream is chosen after the server began to end, however fast tokens are."""
    choose, is_first, has_begun = Sampler.choose, iter([True]), threading.Event()

    def held_back(sampler: Sampler, logits: torch.Tensor) -> Any:
        if not next(is_first, False):
            assert has_begun.wait(PATIENCE_SECONDS)
        return choose(sampler, logits)

    with served(demo, demo_tokenizer, drain_seconds=60) as running:
        expected = running.chat(max_tokens=200, logit_bias=ENDLESS).choices[0].message.content
        monkeypatch.setattr(Sampler, "choose", held_back)
        stream = running.chat(max_tokens=200, logit_bias=ENDLESS, stream=True)
        texts = [next(iter(stream)).choices[0].delta.content]
        running.server.should_exit = True
        eventually(lambda: running.serving.state == "ending")
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            running.chat()
        eventually(lambda: bool(running.told))
        assert running.told == ["ending: 1 response in flight has up to 60 s; Ctrl-C again ends them now"]
        has_begun.set()
        texts += [chunk.choices[0].delta.content for chunk in stream]
        assert "".join(filter(None, texts)) == expected
        running.thread.join(60)
        assert not running.thread.is_alive()


def test_a_server_that_has_nothing_to_finish_says_nothing(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer) as running:
        assert running.chat().choices
        eventually(lambda: running.serving.running == 0)
    assert not running.told


def test_what_has_not_finished_by_then_is_told_so(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, drain_seconds=0.05) as running:
        whole: list[Any] = []

        def ask() -> None:
            with pytest.raises(openai.InternalServerError) as error:
                running.chat(n=6, max_tokens=300, logit_bias=ENDLESS)
            whole.append(error.value)

        stream = running.chat(max_tokens=300, logit_bias=ENDLESS, stream=True)
        next(iter(stream))
        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: running.serving.waiting > 0)
        running.server.should_exit = True
        with pytest.raises(openai.APIError, match="shutting down") as error:
            list(stream)
        assert error.value.code == "shutting_down"
        asking.join(60)
        assert whole[0].status_code == 503 and whole[0].code == "shutting_down"
        running.thread.join(60)
        assert not running.thread.is_alive()


def test_a_loop_that_fails_leaves_nobody_waiting(
    demo: Any, demo_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(demo, demo_tokenizer) as running:
        loop = running.serving._loop
        monkeypatch.setattr(loop, "step", lambda: 1 / 0)
        with pytest.raises(openai.InternalServerError):
            running.chat()
        health = running.http("GET", "/health")
        assert (health.status, json.loads(health.text)) == (503, {"status": "failed"})
        assert [running.http("GET", path).status for path in ("/healthz", "/ready")] == [503, 503]
        with pytest.raises(openai.InternalServerError):
            running.chat()
        loop._asked.clear()


def test_a_server_that_ends_is_live_and_not_ready(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [running.http("GET", path).status for path in ("/healthz", "/ready")] == [200, 200]
    monkeypatch.setattr(running.serving, "_is_ending", True)
    found = [running.http("GET", path) for path in ("/healthz", "/ready")]
    assert [(each.status, json.loads(each.text)) for each in found] == [
        (200, {"status": "ending"}),
        (503, {"status": "ending"}),
    ]


def test_metrics_say_what_the_process_takes(running: Running) -> None:
    """By the names that Prometheus's own client gives them; and no series of when counters began."""
    text = running.http("GET", "/metrics").text
    found = {each.name: each.samples[0].value for each in text_string_to_metric_families(text) if each.samples}
    assert not [name for name in found if name.endswith("_created")] and "_created" not in text
    process = psutil.Process()
    assert found["process_cpu_seconds"] > 0 and found["process_threads"] >= 2
    assert found["process_start_time_seconds"] == pytest.approx(process.create_time(), abs=2)
    assert 0.5 < found["process_resident_memory_bytes"] / process.memory_info().rss < 2
    assert found["process_virtual_memory_bytes"] > found["process_resident_memory_bytes"]


def test_metrics_count(running: Running) -> None:
    def read() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in running.http("GET", "/metrics").text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    before = read()
    running.chat(max_tokens=TOKENS, logit_bias=ENDLESS)
    running.chat(max_tokens=TOKENS, logit_bias=ENDLESS)
    running.http("GET", "/nowhere")
    after = read()
    assert set(before) <= set(after)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["smoe_generated_tokens_total"] == 2 * TOKENS
    assert grown['smoe_http_requests_total{path="/v1/chat/completions",status="200"}'] == 2
    assert grown['smoe_http_requests_total{path="(other)",status="404"}'] == 1
    assert grown["smoe_time_to_first_token_seconds_count"] == 2
    assert grown["smoe_time_between_tokens_seconds_count"] == 2 * (TOKENS - 1)
    assert 0 < grown["smoe_prompt_tokens_reused_total"] < grown["smoe_prompt_tokens_total"]
    assert grown["smoe_expert_uses_total"] >= grown["smoe_expert_hits_total"] > 0
    assert grown["smoe_forward_passes_total"] > 0 and 0 < after["smoe_expert_hit_ratio"] <= 1
    assert after["smoe_texts_running"] == after["smoe_texts_waiting"] == 0


def test_a_client_that_never_reads_holds_nobody_up_and_is_let_go(
    demo: Any, demo_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smoe.server.listening._LAST_SECONDS", 0.2)
    with served(demo, demo_tokenizer, drain_seconds=0.05) as running:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 300}
        body |= {"logprobs": True, "top_logprobs": 20, "logit_bias": ENDLESS}
        host, port = running.url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            sent = json.dumps(body).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            deaf.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
            eventually(lambda: running.serving.running == 1)
            (line,) = (each for each in running.server.server_state.connections if not each.flow.read_paused)
            line.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            assert running.chat().choices
            eventually(lambda: line.flow.write_paused)
            assert running.chat().choices
            eventually(lambda: running.serving.running == 0)  # its text is made all the same
            running.server.should_exit = True
            running.thread.join(60)
            assert not running.thread.is_alive()


def test_told_twice_it_ends_at_once(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, drain_seconds=600) as running:
        stream = running.chat(max_tokens=300, logit_bias=ENDLESS, stream=True)
        next(iter(stream))
        running.server.handle_exit(2)
        running.server.handle_exit(2)
        with pytest.raises(openai.APIError, match="shutting down") as error:
            list(stream)
        assert error.value.code == "shutting_down"
        running.thread.join(60)
        assert not running.thread.is_alive()
