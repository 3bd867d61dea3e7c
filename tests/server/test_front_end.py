"""A front end that people use, Simon Willison's `llm`, started as they start it: a process, and a file that names the
server. Would catch whatever such a program sends that is refused, and answers that it cannot read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.server.conftest import PATIENCE_SECONDS, Running, served

pytest.importorskip("llm")

Llm = Callable[..., "subprocess.CompletedProcess[str]"]
MODELS = """
- model_id: here
  model_name: demo
  api_base: "{url}/v1"
  api_key_name: smoe
  supports_schema: true
"""
LIKELIEST = ("-o", "temperature", "0")
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Lily", "Tom"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTION = "Lily went to the park. Question: Where did Lily go?"


@pytest.fixture(scope="module")
def running(demo: PreTrainedModel, demo_tokenizer: Any) -> Iterator[Running]:
    with served(demo, demo_tokenizer, api_key="a-key") as running:
        yield running


@pytest.fixture(scope="module")
def llm(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Llm:
    """`llm(words)`: what the command says, asked with a user's folder of its own."""
    folder: Path = tmp_path_factory.mktemp("llm")
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(url=running.url))
    environment = {**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "a-key"}

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llm", *words]
        return subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )

    return ask


def test_a_question_and_one_more(llm: Llm, running: Running) -> None:
    """As it comes; then gone on with, in one piece that keeps to a schema, and what was said is not read again."""
    first = llm("-m", "here", "-s", "You answer.", QUESTION, *LIKELIEST, "-o", "max_tokens", "8", "--usage")
    messages = [{"role": "system", "content": "You answer."}, {"role": "user", "content": QUESTION}]
    answer = running.chat(messages=messages, max_tokens=8)
    assert first.stdout == answer.choices[0].message.content + "\n", first.stderr
    assert f"{answer.usage.prompt_tokens} input, {answer.usage.completion_tokens} output" in first.stderr
    second = llm(
        "--continue", "--no-stream", "--schema", json.dumps(PERSON), "Who?", "-o", "max_tokens", "300", "--usage"
    )
    found = json.loads(second.stdout)
    assert set(found) == {"name", "age"} and found["name"] in ("Lily", "Tom") and 1 <= found["age"] <= 9
    told = json.loads("{" + second.stderr.partition("{")[2])
    assert told["prompt_tokens_details"]["cached_tokens"] >= answer.usage.prompt_tokens, second.stderr


def test_a_refusal_is_told_in_our_words(llm: Llm) -> None:
    long = llm("-m", "here", "word " * 2000)
    assert long.returncode != 0 and "maximum context length is 384 tokens" in long.stderr


def test_the_questions_that_open_webui_asks_besides(running: Running) -> None:
    """For a title, for tags, for what to ask next: after each answer, beside the conversation, and without a stream."""
    task = '### Task:\nGenerate a concise title.\n### Output:\nJSON format: { "title": "..." }'
    sent = {"model": "demo", "messages": [{"role": "user", "content": task}], "stream": False, "max_tokens": 1000}
    heads = {"Authorization": "Bearer a-key", "User-Agent": "Python/3.11 aiohttp/3.14.5"}
    answer = running.http("POST", "/v1/chat/completions", sent, **heads)
    assert answer.status == 200 and json.loads(answer.text)["choices"][0]["message"]["role"] == "assistant"


def test_who_sends_tools_is_told_what_to_do(running: Running) -> None:
    """Open WebUI sends some with every message, and shows what it is told."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}, "type": "object"}}}
    sent = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "stream": True, "tools": [tool]}
    answer = running.http("POST", "/v1/chat/completions", sent, Authorization="Bearer a-key")
    assert (answer.status, answer.error["code"]) == (400, "no_tools")
    assert "switch them off" in answer.error["message"] and "--chat-template FILE" in answer.error["message"]
