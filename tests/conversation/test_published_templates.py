"""The published chat templates that llama.cpp keeps: each writes every conversation that is valid for it.

SMOE_LLAMA_CPP names a source tree of llama.cpp; without it nothing is tested here. Where transformers can write a
conversation, ours is the same text; where it cannot, ours says everything that the conversation does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from smoe.conversation.chat_template import ChatTemplate
from smoe.conversation.conversation import Conversation
from smoe.errors import ChatTemplateError
from tests.toy import ascii_tokenizer

_FOLDER = Path(os.environ.get("SMOE_LLAMA_CPP", "/nonexistent")) / "models" / "templates"
_TEMPLATES = sorted(_FOLDER.glob("*.jinja"))
pytestmark = pytest.mark.skipif(not _TEMPLATES, reason="SMOE_LLAMA_CPP names no source tree of llama.cpp")

_CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}}, "required": ["city"]}
_FULL = {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": _CITY}}
_SHORT = {"type": "object", "properties": {"city": {"type": "string"}}}
_NO_DESCRIPTION = {"type": "function", "function": {"name": "weather", "parameters": _SHORT}}
_BARE = {"type": "function", "function": {"name": "weather"}}
_USER = {"role": "user", "content": "Hi there"}
_SURE = {"role": "assistant", "content": "Sure, "}


def _called(*ids: str) -> list[dict[str, Any]]:
    calls = [{"id": i, "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}} for i in ids]
    results = [{"role": "tool", "tool_call_id": i, "content": "Sunny"} for i in ids]
    return [_USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


CONVERSATIONS = {
    "plain": Conversation([_USER, _SURE, {"role": "user", "content": "More"}]),
    "system": Conversation([{"role": "system", "content": "Be kind"}, _USER]),
    "developer": Conversation([{"role": "developer", "content": "Be kind"}, _USER]),
    "prefilled": Conversation([_USER, _SURE]),
    "tools": Conversation([_USER], [_FULL]),
    "a tool without description": Conversation([_USER], [_NO_DESCRIPTION]),
    "a tool of a name alone": Conversation([_USER], [_BARE]),
    "a call": Conversation(_called("abc123DEF"), [_FULL]),
    "a foreign id": Conversation(_called("call_5f2e-77_long"), [_FULL]),
    "several calls": Conversation(_called("call_1aaaaaaaa", "call_2bbbbbbbb"), [_FULL]),
    "a call of a tool of a name alone": Conversation([*_called("call_1"), _SURE, _USER], [_BARE]),
}
_REFUSED = {
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "gemma3": "roles must alternate",
    "google-gemma-2-2b-it": "roles must alternate",
    "llama-cpp-deepseek-r1": "generator is not JSON serializable",
    "meta-llama-Llama-3.1-8B-Instruct": "single tool-calls",
    "meta-llama-Llama-3.2-3B-Instruct": "single tool-calls",
    "meta-llama-Llama-3.3-70B-Instruct": "single tool-calls",
}
"""What these refuse on purpose, or read from a variable of their own."""


@pytest.mark.parametrize("path", _TEMPLATES, ids=lambda path: path.stem)
def test_every_valid_conversation_is_written(path: Path) -> None:
    tokenizer = ascii_tokenizer(path.read_text(encoding="utf8"))
    tokenizer.bos_token = "<s>"
    template = ChatTemplate(tokenizer)
    try:
        for name, conversation in CONVERSATIONS.items():
            check(template, tokenizer, name, conversation, path.stem)
    finally:
        template.close()


def check(template: ChatTemplate, tokenizer: Any, name: str, conversation: Conversation, model: str) -> None:
    expected = _by_the_library(tokenizer, conversation)
    try:
        written = template.write(conversation)
    except ChatTemplateError as error:
        assert expected is None and _REFUSED.get(model, "nothing") in str(error), (name, error)
        return
    if name == "developer":
        assert "Be kind" in written
    elif expected is not None:
        assert written == expected, name
    assert "Hi there" in written, name


def _by_the_library(tokenizer: Any, conversation: Conversation) -> str | None:
    """None where it cannot write it."""
    try:
        return str(
            tokenizer.apply_chat_template(
                conversation.messages, conversation.tools, tokenize=False, add_generation_prompt=True
            )
        )
    except Exception:
        return None
