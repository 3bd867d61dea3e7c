"""Real servers on free ports of this machine, each on a thread, asked by OpenAI's own client."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import openai
import pytest
from transformers import AutoTokenizer, PreTrainedModel

from smoe import from_pretrained
from smoe.generation.sampler import Sampler
from smoe.models.files import DEMO_FOLDER
from smoe.server.listening import Server
from smoe.server.listening_socket import address_of, bound
from smoe.server.serving import Serving
from smoe.server.settings import ServerConfig

PATIENCE_SECONDS = 60.0
ENDLESS = {"0": -100}
"""As a `logit_bias`: the embedded model's end token does not come."""


class Answered(NamedTuple):
    """What came over HTTP."""

    status: int
    headers: Any
    text: str

    @property
    def error(self) -> dict[str, Any]:
        """The API's error; fails where the answer is anything else."""
        body = json.loads(self.text)
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = body["error"]
        return error


class Running(NamedTuple):
    """A server that runs."""

    url: str
    client: openai.OpenAI
    serving: Serving
    server: Server
    thread: threading.Thread
    told: list[str]
    """What whoever started it was told."""

    def http(self, method: str, path: str, body: Any = None, **headers: str) -> Answered:
        """One request as it is: `body` is bytes, or what becomes JSON."""
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        line = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=PATIENCE_SECONDS)
        if body is not None and not isinstance(body, bytes):
            body, headers = json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        try:
            line.request(method, path, body, headers)
            answer = line.getresponse()
            return Answered(answer.status, answer.headers, answer.read().decode())
        finally:
            line.close()

    def chat(self, text: str = "Who went to the park?", **fields: Any) -> Any:
        """One answer to one message: the likeliest, unless `fields` say otherwise."""
        fields = {"temperature": 0, "max_tokens": 8, **fields}
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        return self.client.chat.completions.create(model=self.serving.name, messages=messages, **fields)


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until it does."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end, "has not come to be"
        time.sleep(0.002)


@contextmanager
def served(model: PreTrainedModel, tokenizer: Any, **config: Any) -> Iterator[Running]:
    """A server of a model, ended at the end."""
    settings = ServerConfig(port=0, **{"drain_seconds": 0.0, **config})
    with bound(settings) as bound_socket:
        told: list[str] = []
        serving = Serving(model, tokenizer, "demo", settings, told.append)
        serving.start()
        server = Server(serving, told.append, told.append)
        thread = threading.Thread(target=server.run, args=([bound_socket],))
        url = address_of(bound_socket)
        thread.start()
        try:
            eventually(lambda: server.started)
            key = settings.api_key or "none"
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_SECONDS) as client:
                yield Running(url, client, serving, server, thread, told)
        finally:
            server.should_exit = True
            thread.join()
            serving.close()


@pytest.fixture(scope="session")
def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_FOLDER)


@pytest.fixture(scope="session")
def demo() -> Iterator[PreTrainedModel]:
    """The embedded model, with places for four texts."""
    model = from_pretrained("demo", memory="48MiB", context_tokens=384, max_sequences=4, kernels="torch")
    with model.offload:
        yield model


@pytest.fixture(scope="module")
def running(demo: PreTrainedModel, demo_tokenizer: Any) -> Iterator[Running]:
    with served(demo, demo_tokenizer) as running:
        yield running


@pytest.fixture
def script(running: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the model write something, and end."""

    def write(text: str) -> None:
        ids = [*running.serving.tokenizer(text, add_special_tokens=False)["input_ids"], *running.serving.ends]
        left: dict[int, tuple[Sampler, Iterator[int]]] = {}  # with the sampler: its number is given to no other

        def choose(sampler: Sampler, logits: Any) -> Any:
            _, following = left.setdefault(id(sampler), (sampler, iter(ids)))
            return next(following), None, ()

        monkeypatch.setattr(Sampler, "choose", choose)

    return write
