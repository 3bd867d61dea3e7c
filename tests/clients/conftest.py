"""A server for the tests of real clients: its model answers each prompt with a given text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from smoe import from_pretrained
from tests.clients.scripted import TEMPLATE, answer_to, scripted
from tests.server.conftest import Running, served
from tests.toy import save_toy


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = save_toy(tmp_path_factory.mktemp("clients"), template=TEMPLATE, max_position_embeddings=8192)
    model = from_pretrained(folder, memory="24MiB", context_tokens=4096, max_sequences=2)
    with model.offload, served(model, AutoTokenizer.from_pretrained(folder), api_key="a-key") as running:
        yield running


@pytest.fixture(autouse=True)
def answered(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, running.serving.tokenizer, answer_to)
