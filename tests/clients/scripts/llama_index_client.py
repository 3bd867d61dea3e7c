"""LlamaIndex, by its package for servers like OpenAI's: chat, streams, tools, structured answers, errors."""

from __future__ import annotations

import os
from typing import Any, Literal

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

RESULT = os.environ["RESULT"]
QUESTION = "How warm is it?"
asked = [ChatMessage(role="user", content=QUESTION)]
settings: dict[str, Any] = {
    "model": "demo", "api_base": f"{os.environ['URL']}/v1", "api_key": os.environ["KEY"], "max_retries": 0,
    "max_tokens": 300, "context_window": 4096, "is_chat_model": True, "is_function_calling_model": True,
}  # fmt: skip
llm = OpenAILike(**settings)


class Person(BaseModel):
    name: Literal["Tom", "Lily"]
    age: Literal[7, 8]


def warmth(city: str) -> str:
    """How warm a city is"""
    return RESULT if city == "Oslo" else "unknown"


assert llm.chat(asked).message.content == "Hello there, you."
assert "".join(part.delta or "" for part in llm.stream_chat(asked)) == "Hello there, you."
assert llm.complete(QUESTION).text == "Hello there, you."

tool = FunctionTool.from_defaults(warmth)
first = llm.chat_with_tools([tool], QUESTION)
(call,) = llm.get_tool_calls_from_response(first)
assert call.tool_kwargs == {"city": "Oslo"}
result = ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_call_id": call.tool_id})
second = llm.chat_with_tools([tool], chat_history=[*asked, first.message, result])
assert second.message.content == "It is cold." and second.raw.usage.prompt_tokens > 10
assert llm.predict_and_call([tool], QUESTION).response == RESULT
for part in llm.stream_chat_with_tools([tool], QUESTION):
    last = part
assert llm.get_tool_calls_from_response(last)[0].tool_kwargs == {"city": "Oslo"}

assert isinstance(llm.as_structured_llm(Person).complete(QUESTION).raw, Person)
strict = OpenAILike(**settings, should_use_structured_outputs=True)
assert isinstance(strict.as_structured_llm(Person).complete(QUESTION).raw, Person)
try:
    OpenAILike(**{**settings, "model": "other"}).chat(asked)
except openai.NotFoundError as error:
    assert "does not exist here" in str(error)
else:
    raise AssertionError("an unknown model was accepted")
print("all right")
