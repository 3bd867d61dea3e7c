"""instructor, in its modes whose answer the server enforces: the model of these tests knows no JSON."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.values import ASKED, Person
from tests.server.conftest import Running

instructor: Any = pytest.importorskip("instructor")
MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"]


@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_filled_in(running: Running, mode: str) -> None:
    client = instructor.from_openai(running.client, mode=getattr(instructor.Mode, mode))
    asked = {"model": "demo", "messages": ASKED, "max_tokens": 200, "max_retries": 0}
    assert isinstance(client.create(response_model=Person, **asked), Person)
    parts = list(client.create_partial(response_model=Person, **asked))
    assert Person.model_validate(parts[-1].model_dump())


def test_anthropics_client_below_it(running: Running) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=running.url, api_key="a-key", max_retries=0))
    asked = {"model": "any", "messages": ASKED, "max_tokens": 200, "max_retries": 0}
    assert isinstance(client.create(response_model=Person, **asked), Person)
