"""A chat template that does not end. Would catch a server that answers nobody, does not say what is wrong, or does not
end, and control tokens that a message brings in over HTTP.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from smoe import from_pretrained
from tests.server.conftest import Running, eventually, served
from tests.toy import END, TEMPLATE, save_toy

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ON_REQUEST = f"{{% if messages[0].content == 'hang' %}}{LOOPS}{{% endif %}}{TEMPLATE}"


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder: Path = save_toy(tmp_path_factory.mktemp("hangs"), template=ON_REQUEST)
    model = from_pretrained(folder, memory="16MiB", context_tokens=200, threads=1)
    with model.offload:
        yield model, folder


@pytest.fixture
def running(toy_model: tuple[Any, Path]) -> Iterator[Running]:
    model, folder = toy_model
    with served(model, AutoTokenizer.from_pretrained(folder)) as running:
        yield running


def limit(running: Running, seconds: float) -> None:
    running.serving.prompts._conversations.template._process.seconds = seconds


def health(running: Running) -> dict[str, str]:
    state: dict[str, str] = json.loads(running.http("GET", "/health").text)
    return state


def test_a_request_that_hangs_the_template_is_refused_and_health_says_so(running: Running) -> None:
    limit(running, 1.0)
    with pytest.raises(openai.BadRequestError, match="takes longer than the limit of 1 s"):
        running.chat("hang")
    assert health(running) == {"status": "ok", "chat_template": "failed"}
    completion = running.client.completions.create(model="demo", prompt="a", max_tokens=2)
    assert completion.usage is not None and completion.usage.completion_tokens == 2
    limit(running, 60.0)
    assert running.chat("a", max_tokens=2).usage.completion_tokens == 2
    assert health(running) == {"status": "ok"}


def test_while_a_template_hangs_the_server_answers_and_ends(running: Running) -> None:
    limit(running, 600.0)
    running.chat("a", max_tokens=2)
    refused: list[openai.APIStatusError] = []

    def ask() -> None:
        with pytest.raises(openai.APIStatusError) as error:
            running.chat("hang")
        refused.append(error.value)

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: running.serving.prompts._conversations.template._process._turn.locked())
    assert health(running) == {"status": "ok"}
    running.server.handle_exit(15)
    running.thread.join(60)
    asking.join(60)
    assert not running.thread.is_alive() and not asking.is_alive()
    assert refused[0].status_code == 503


def test_a_template_that_always_hangs_leaves_completions(
    toy_model: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at when the server starts, to see whether it takes tools."""
    model, folder = toy_model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = LOOPS
    monkeypatch.setattr("smoe.conversation.template_process.SECONDS", 0.5)
    with served(model, tokenizer) as running:
        assert health(running) == {"status": "ok", "chat_template": "failed"}
        assert running.client.completions.create(model="demo", prompt="a", max_tokens=2).choices
        with pytest.raises(openai.BadRequestError, match="takes longer"):
            running.chat("a")


@pytest.mark.parametrize("parses", [False, True])
def test_a_message_brings_in_a_control_token_only_where_it_was_said(toy_model: tuple[Any, Path], parses: bool) -> None:
    model, folder = toy_model
    with served(model, AutoTokenizer.from_pretrained(folder), parses_control_tokens=parses) as running:
        plain = running.chat("ab", max_tokens=1).usage.prompt_tokens
        assert running.chat(f"a{END}b", max_tokens=1).usage.prompt_tokens - plain == (1 if parses else len(END))
