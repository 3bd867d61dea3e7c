"""Open WebUI's own server, asked as its page asks it, by both of its connections: OpenAI's API and Ollama's. Would
catch a request of it that is refused, and an answer that its page does not show.

`make test-optional` installs it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.open_webui_packages import wanted
from tests.clients.scripted import RESULT
from tests.clients.values import QUESTION, TOOL
from tests.server.conftest import Running

COMMAND = os.environ.get("SMOE_OPEN_WEBUI", "")
START_SECONDS = 600
"""The first start creates a data base."""
needs_open_webui = pytest.mark.skipif(not COMMAND, reason="SMOE_OPEN_WEBUI names no open-webui")
MODELS = pytest.mark.parametrize("model", ["openai.demo", "demo"])
"""The same model by OpenAI's API, where Open WebUI puts a prefix before its name, and by Ollama's."""


class Page(NamedTuple):
    """The page's side of Open WebUI: its requests, with the token of the only user."""

    url: str
    token: str = ""

    def ask(self, path: str, body: Any = None) -> str:
        """Send a request, and return the answer's text."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=120) as answer:
            return str(answer.read().decode())

    def chat(self, **fields: Any) -> Any:
        """Continue a conversation: the answer, or the chunks of a stream."""
        said = {"messages": [{"role": "user", "content": QUESTION}], "params": {}, "features": {}}
        text = self.ask("/api/chat/completions", {**said, **fields})
        if not fields["stream"]:
            return json.loads(text)
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="module")
def page(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Open WebUI with two connections to the server, without accounts, and without requests to other machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("open_webui")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "DATA_DIR": str(folder),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "any",
        "OFFLINE_MODE": "True",
        "ANONYMIZED_TELEMETRY": "False",
        "RAG_EMBEDDING_ENGINE": "openai",  # else it loads a model for embeddings
        "OPENAI_API_BASE_URL": f"{running.url}/v1",
        "OPENAI_API_KEY": "a-key",
        "OPENAI_API_CONFIGS": json.dumps({"0": {"enable": True, "prefix_id": "openai"}}),
        "OLLAMA_BASE_URL": running.url,
        "OLLAMA_API_CONFIGS": json.dumps({"0": {"enable": True, "key": "a-key"}}),
        "DEFAULT_MODEL_METADATA": json.dumps({"capabilities": {"builtin_tools": False}}),
    }
    with (folder / "log").open("wb") as log:
        line = [COMMAND, "serve", "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(line, env=environment, cwd=folder, stdout=log, stderr=log)
        try:
            yield _signed_in(f"http://127.0.0.1:{port}", process, folder / "log")
        finally:
            process.terminate()
            process.wait()


def _signed_in(url: str, process: subprocess.Popen[bytes], log: Path) -> Page:
    """Wait until it listens, and sign in as the only user, as the page does."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            return Page(url, json.loads(Page(url).ask("/api/v1/auths/signin", {"email": "", "password": ""}))["token"])
        except (urllib.error.URLError, ConnectionError):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(1)


@needs_open_webui
def test_both_connections_list_the_model(page: Page) -> None:
    listed = {model["id"]: model["owned_by"] for model in json.loads(page.ask("/api/models"))["data"]}
    assert listed.items() >= {"openai.demo": "openai", "demo": "ollama"}.items()
    assert json.loads(page.ask("/ollama/api/version"))["version"]
    assert [model["name"] for model in json.loads(page.ask("/ollama/api/ps"))["models"]] == ["demo"]


@needs_open_webui
@MODELS
def test_answers_whole_and_streamed(page: Page, model: str) -> None:
    whole = page.chat(model=model, stream=False)
    assert whole["choices"][0]["message"]["content"] == "Hello there, you." and whole["usage"]["completion_tokens"] > 3
    chunks = page.chat(model=model, stream=True)
    said = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(said) == "Hello there, you." and len(said) > 5
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "stop"


@needs_open_webui
@MODELS
def test_tools(page: Page, model: str) -> None:
    chunks = page.chat(model=model, stream=True, tools=[TOOL])
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert "".join(call.get("name") or "" for call in calls) == "warmth"
    assert json.loads("".join(call["arguments"] for call in calls)) == {"city": "Oslo"}
    call = {"id": "call_1", "type": "function", "function": {"name": "warmth", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
    ]
    answer = page.chat(model=model, stream=False, messages=messages, tools=[TOOL])
    assert answer["choices"][0]["message"]["content"] == "It is cold."


@needs_open_webui
@MODELS
def test_a_new_chat_of_the_page(page: Page, model: str) -> None:
    """The page sends a message, and Open WebUI stores the answer in the chat; then it asks for a title."""
    mine, answer = str(uuid.uuid4()), str(uuid.uuid4())
    message = {"id": mine, "parentId": None, "childrenIds": [answer], "role": "user", "content": QUESTION}
    sent = {"session_id": "none", "parent_id": None, "id": answer, "user_message": message | {"models": [model]}}
    said = {"messages": [{"role": "user", "content": QUESTION}], "params": {}, "features": {}, "variables": {}}
    asked = {"model": model, "stream": True, **said, **sent, "background_tasks": {"title_generation": True}}
    begun = json.loads(page.ask("/api/chat/completions", asked))
    end = time.monotonic() + 120
    while True:
        chat = json.loads(page.ask(f"/api/v1/chats/{begun['chat_id']}"))["chat"]
        stored = chat.get("history", {}).get("messages", {}).get(answer, {})
        if stored.get("done"):
            break
        assert time.monotonic() < end, chat
        time.sleep(0.2)
    assert (stored["content"], stored.get("error")) == ("Hello there, you.", None)
    title = json.loads(page.ask("/api/v1/tasks/title/completions", {"model": model, "messages": said["messages"]}))
    assert title["choices"][0]["message"]["content"] == "Hello there, you."


def test_what_runs_models_is_left_out() -> None:
    given = ["fastapi==1", "uvicorn[standard]==2", "sentence_transformers==5", "boto3==1; extra == 'all'"]
    assert wanted(given) == given[:2]
