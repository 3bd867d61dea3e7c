"""Every field of OpenAI's is used, ignored or refused on purpose. Would catch one that clients send and nobody here
knows."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from openai.resources.chat.completions import Completions
from openai.resources.completions import Completions as TextCompletions
from openai.resources.responses import Responses

from smoe.server.fields import Asked, ChatAsked, CompletionAsked, ResponseAsked

OURS = {"seed", "top_k", "repetition_penalty", "chat_template_kwargs"}
ASKED = [(ChatAsked, Completions), (CompletionAsked, TextCompletions), (ResponseAsked, Responses)]


def fields_of(client: Any) -> set[str]:
    """What the client can send."""
    return set(inspect.signature(client.create).parameters) - {
        "self", "extra_headers", "extra_query", "extra_body", "timeout"
    }  # fmt: skip


@pytest.mark.parametrize(("asked", "client"), ASKED)
def test_every_field_of_the_client_is_known(asked: type[Asked], client: Any) -> None:
    assert fields_of(client) <= set(asked.model_fields)
    assert set(asked.model_fields) - fields_of(client) <= OURS


@pytest.mark.parametrize("asked", [asked for asked, _ in ASKED])
def test_what_is_refused_is_a_field(asked: type[Asked]) -> None:
    assert set(asked.unsupported) <= set(asked.model_fields)
    assert set(asked.names.values()) <= set(asked.model_fields)
