"""Every field of OpenAI's is used, ignored or refused on purpose. Would catch one that clients send and nobody here
knows."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from openai.resources.chat.completions import Completions
from openai.resources.completions import Completions as TextCompletions
from openai.resources.responses import Responses

from smoe.server.fields import ChatAsked, CompletionAsked, RequestFields, ResponseAsked
from smoe.server.neutral_fields import NEUTRAL, NeutralFields
from smoe.server.problem import ApiError

OURS = {"seed", "top_k", "min_p", "repetition_penalty", "repeat_penalty", "chat_template_kwargs",
        "add_generation_prompt", "continue_final_message", "cache_prompt", "ignore_eos", "repeat_last_n",
        "thinking_budget_tokens", "grammar", "n_predict", "num_predict"}  # fmt: skip
OTHERS = set(NeutralFields.model_fields)
ASKED = [(ChatAsked, Completions), (CompletionAsked, TextCompletions), (ResponseAsked, Responses)]


def fields_of(client: Any) -> set[str]:
    """What the client can send."""
    return set(inspect.signature(client.create).parameters) - {
        "self", "extra_headers", "extra_query", "extra_body", "timeout"
    }  # fmt: skip


@pytest.mark.parametrize(("asked", "client"), ASKED)
def test_every_field_of_the_client_is_known(asked: type[RequestFields], client: Any) -> None:
    assert fields_of(client) <= set(asked.model_fields)
    assert set(asked.model_fields) - fields_of(client) - set(asked.unsupported) <= OURS | OTHERS


@pytest.mark.parametrize("asked", [asked for asked, _ in ASKED])
def test_what_is_refused_is_a_field(asked: type[RequestFields]) -> None:
    assert set(asked.unsupported) <= set(asked.model_fields)
    assert set(asked.names.values()) <= set(asked.model_fields)


FIRST: list[tuple[type[RequestFields], dict[str, Any]]] = [
    (ChatAsked, {"model": "demo", "messages": [{"role": "user", "content": "x"}]}),
    (CompletionAsked, {"model": "demo", "prompt": "x"}),
    (ResponseAsked, {"model": "demo", "input": "x"}),
]
SENT: dict[str, Any] = {
    "n": 1, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "someone",
    "repetition_penalty": 1.0, "repeat_penalty": 1.0, "repeat_last_n": 64, "top_k": -1, "top_p": 1, "min_p": 0,
    "typical_p": 1.0, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "best_of": 1, "echo": False,
    "suffix": "", "seed": -1, "cache_prompt": True,
}  # fmt: skip
"""As clients of other servers send it with every request: nothing in it changes an answer."""


@pytest.mark.parametrize(("asked", "first"), FIRST)
def test_values_that_change_nothing_are_accepted(asked: type[RequestFields], first: dict[str, Any]) -> None:
    asked.model_validate(first | SENT).check_unsupported()
    for name, values in (NEUTRAL | asked.unsupported).items():
        for value in (None, *values):
            asked.model_validate(first | {name: value}).check_unsupported()
    chat = {"parallel_tool_calls": True, "service_tier": "auto", "store": False, "stream_options": {}}
    if asked is ChatAsked:
        asked.model_validate(first | SENT | chat).check_unsupported()


@pytest.mark.parametrize(("asked", "first"), FIRST)
def test_other_values_are_refused_by_the_fields_name(asked: type[RequestFields], first: dict[str, Any]) -> None:
    for name, values in (NEUTRAL | asked.unsupported).items():
        for value in (2, 0.5, True, False, 0, 1, "x", ["x"], {"x": 1}):
            if not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in values):
                with pytest.raises(ApiError, match=f"'{name}' is not supported by this server; leave it out") as error:
                    asked.model_validate(first | {name: value}).check_unsupported()
                assert (error.value.param, error.value.code) == (name, "unsupported_parameter")


def test_a_refusal_says_what_is_allowed() -> None:
    with pytest.raises(ApiError, match="'typical_p' is not supported by this server; leave it out, or give 1"):
        ChatAsked.model_validate(FIRST[0][1] | {"typical_p": 0.9}).check_unsupported()


def test_every_neutral_value_belongs_to_a_field() -> None:
    assert set(NEUTRAL) <= OTHERS
