"""litellm, by its providers for OpenAI's, Anthropic's and Ollama's APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.scripted import RESULT
from tests.clients.values import ASKED, TOOL, Person
from tests.server.conftest import Running

litellm: Any = pytest.importorskip("litellm")
PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": "", "ollama_chat": ""}


@pytest.fixture(params=PROVIDERS)
def asked(request: pytest.FixtureRequest, running: Running) -> dict[str, Any]:
    base = running.url + PROVIDERS[request.param]
    return {"model": f"{request.param}/demo", "api_base": base, "api_key": "a-key", "max_tokens": 300, "max_retries": 0}


def test_a_call_goes_forth_and_back(asked: dict[str, Any]) -> None:
    message = litellm.completion(**asked, messages=ASKED, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("warmth", {"city": "Oslo"})
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    again = litellm.completion(**asked, messages=[*ASKED, message.model_dump(), result], tools=[TOOL])
    assert again.choices[0].message.content == "It is cold." and again.usage.prompt_tokens > 10


def test_streams(asked: dict[str, Any]) -> None:
    chunks = list(litellm.completion(**asked, messages=ASKED, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there, you."
    chunks = list(litellm.completion(**asked, messages=ASKED, tools=[TOOL], stream=True))
    whole = litellm.stream_chunk_builder(chunks).choices[0].message
    assert json.loads(whole.tool_calls[0].function.arguments) == {"city": "Oslo"}


def test_structured_answers(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, messages=ASKED, response_format=Person)
    Person.model_validate_json(answer.choices[0].message.content)


def test_errors(asked: dict[str, Any]) -> None:
    wrong = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises((litellm.BadRequestError, litellm.APIConnectionError), match="maximum context length"):
        litellm.completion(**asked, messages=wrong)
