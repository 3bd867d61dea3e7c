"""LangChain, by its packages for OpenAI's, Anthropic's and Ollama's APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.scripted import RESULT
from tests.clients.values import QUESTION, TOOL, Person
from tests.server.conftest import Running

messages: Any = pytest.importorskip("langchain_core.messages")


def _openai(url: str, **more: Any) -> Any:
    package = pytest.importorskip("langchain_openai")
    return package.ChatOpenAI(
        model="demo", base_url=f"{url}/v1", api_key="a-key", max_retries=0, stream_usage=True, **more
    )


def _responses(url: str) -> Any:
    return _openai(url, use_responses_api=True)


def _anthropic(url: str) -> Any:
    package = pytest.importorskip("langchain_anthropic")
    return package.ChatAnthropic(model="demo", base_url=url, api_key="a-key", max_retries=0, max_tokens=300)


def _ollama(url: str) -> Any:
    package = pytest.importorskip("langchain_ollama")
    return package.ChatOllama(
        model="demo", base_url=url, client_kwargs={"headers": {"Authorization": "Bearer a-key"}}, num_predict=300
    )


OPENAI = (_openai, _responses)
Make = Callable[[str], Any]
every_api = pytest.mark.parametrize("make", [*OPENAI, _anthropic, _ollama], ids=lambda make: make.__name__)


def text_of(message: Any) -> str:
    return str(message.text if isinstance(message.text, str) else message.text())


@every_api
def test_a_call_goes_forth_and_back(running: Running, make: Make) -> None:
    with_tools, asked = make(running.url).bind_tools([TOOL]), [messages.HumanMessage(QUESTION)]
    answer = with_tools.invoke(asked)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("warmth", {"city": "Oslo"})
    second = with_tools.invoke([*asked, answer, messages.ToolMessage(RESULT, tool_call_id=call["id"])])
    assert text_of(second) == "It is cold." and second.usage_metadata["input_tokens"] > 10


@every_api
def test_streams(running: Running, make: Make) -> None:
    chat = make(running.url)
    assert "".join(text_of(part) for part in chat.stream(QUESTION)) == "Hello there, you."
    whole: Any = None
    for part in chat.bind_tools([TOOL]).stream(QUESTION):
        whole = part if whole is None else whole + part
    assert whole.tool_calls[0]["args"] == {"city": "Oslo"} and whole.usage_metadata["output_tokens"] > 10


@every_api
def test_structured_answers(running: Running, make: Make) -> None:
    chat = make(running.url)
    assert isinstance(chat.with_structured_output(Person, method="json_schema").invoke(QUESTION), Person)


@pytest.mark.parametrize("make", [*OPENAI, _anthropic], ids=lambda make: make.__name__)
def test_a_call_can_be_required(running: Running, make: Make) -> None:
    """Not by Ollama's API, which has no such field."""
    chat = make(running.url)
    assert isinstance(chat.with_structured_output(Person, method="function_calling").invoke(QUESTION), Person)
    answer = chat.bind_tools([TOOL], tool_choice="warmth").invoke(QUESTION)
    assert answer.tool_calls[0]["args"]["city"] in ("Oslo", "Rome")
