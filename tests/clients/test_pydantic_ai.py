"""pydantic-ai, by its models for OpenAI's two APIs, for Anthropic's and for Ollama. Its version 2.38 makes no message
with version 2 of Anthropic's client, whatever the server: it calls a type that has become a union."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.scripted import RESULT
from tests.clients.values import QUESTION, Person
from tests.server.conftest import Running

pydantic_ai: Any = pytest.importorskip("pydantic_ai")


def _chat(url: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="a-key"))


def _responses(url: str) -> Any:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIResponsesModel("demo", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="a-key"))


def _anthropic(url: str) -> Any:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    # by the model's name it finds what a model of Anthropic supports
    profile = {"supports_json_schema_output": True}
    return AnthropicModel("demo", provider=AnthropicProvider(base_url=url, api_key="a-key"), profile=profile)


def _ollama(url: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.ollama import OllamaProvider

    return OpenAIChatModel("demo", provider=OllamaProvider(base_url=f"{url}/v1", api_key="a-key"))


Make = Callable[[str], Any]
every_model = pytest.mark.parametrize("make", [_chat, _responses, _anthropic, _ollama], ids=lambda make: make.__name__)


def agent_of(make: Make, running: Running, **more: Any) -> Any:
    return pydantic_ai.Agent(make(running.url), model_settings={"max_tokens": 300}, **more)


@every_model
def test_an_agent_calls_a_tool(running: Running, make: Make) -> None:
    agent = agent_of(make, running)

    @agent.tool_plain
    def warmth(city: str) -> str:
        """How warm a city is"""
        return RESULT if city == "Oslo" else "unknown"

    answer = agent.run_sync(QUESTION)
    assert answer.output == "It is cold." and len(answer.all_messages()) == 4


@every_model
def test_structured_answers(running: Running, make: Make) -> None:
    assert isinstance(agent_of(make, running, output_type=Person).run_sync(QUESTION).output, Person)
    native = pydantic_ai.NativeOutput(Person)
    assert isinstance(agent_of(make, running, output_type=native).run_sync(QUESTION).output, Person)


@every_model
def test_streams(running: Running, make: Make) -> None:
    async def asked() -> str:
        async with agent_of(make, running).run_stream(QUESTION) as stream:
            return "".join([text async for text in stream.stream_text(delta=True)])

    assert asyncio.run(asked()) == "Hello there, you."
