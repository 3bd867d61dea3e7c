"""Every field of OpenAI's is used, ignored or refused on purpose. Would catch one that clients send and nobody here
knows."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from openai.resources.chat.completions import Completions
from openai.resources.completions import Completions as TextCompletions
from openai.resources.responses import Responses

from smoe.server.api_errors import ApiError
from smoe.server.fields import ChatAsked, CompletionAsked, RequestFields
from smoe.server.message_fields import MessagesAsked
from smoe.server.neutral_fields import NEUTRAL, NeutralFields
from smoe.server.response_fields import ResponseAsked

OURS = {"seed", "top_k", "min_p", "repetition_penalty", "repeat_penalty", "chat_template_kwargs",
        "add_generation_prompt", "continue_final_message", "cache_prompt", "ignore_eos", "repeat_last_n",
        "thinking_budget_tokens", "grammar", "n_predict", "num_predict", "max_completion_tokens",
        "response_format", "client_metadata"}  # fmt: skip
OTHERS = set(NeutralFields.model_fields)
PATHS: dict[str, type[RequestFields]] = {
    "chat": ChatAsked, "completions": CompletionAsked, "responses": ResponseAsked, "messages": MessagesAsked
}  # fmt: skip
"""By the words for them in the documentation."""
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
    (MessagesAsked, {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
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
                with pytest.raises(ApiError, match=f"'{name}' is not supported in this request; leave it out") as error:
                    asked.model_validate(first | {name: value}).check_unsupported()
                assert (error.value.param, error.value.code) == (name, "unsupported_parameter")


def test_a_refusal_says_what_is_allowed() -> None:
    with pytest.raises(ApiError, match="'typical_p' is not supported in this request; leave it out, or give 1"):
        ChatAsked.model_validate(FIRST[0][1] | {"typical_p": 0.9}).check_unsupported()
    with pytest.raises(ApiError, match="leave it out, or give 0; use 'logprobs'"):
        CompletionAsked.model_validate(FIRST[1][1] | {"top_logprobs": 2}).check_unsupported()


def test_a_field_of_the_documentation_is_used_or_refused_on_every_path() -> None:
    """Would catch a field that one path has and another drops: the table's second column names the paths of each."""
    table = Path("docs/serve.md").read_text(encoding="utf8").partition("| field | paths | meaning |\n")[2]
    rows = [line.split(" | ", 2) for line in table.partition("\n\n")[0].splitlines()[1:]]
    assert len(rows) > 10
    for names, paths, _ in rows:
        for name in re.findall(r"`([a-z_]+)[`.]", names):
            for path, kind in PATHS.items():
                is_used = name in kind.model_fields and name not in kind.harmless()
                is_promised = path in paths or paths == "all"
                assert name in kind.model_fields, f"{path} does not know {name}"
                assert is_used == is_promised, f"{path}: {name}"


def test_the_field_to_use_instead_exists() -> None:
    for kind in PATHS.values():
        assert set(kind.instead) <= set(kind.unsupported)
        assert {name.partition(".")[0] for name in kind.instead.values()} <= set(kind.model_fields)
        for name in kind.instead:
            assert name in kind.model_json_schema()["properties"] and "Use '" in str(
                kind.model_json_schema()["properties"][name]
            )


def test_every_neutral_value_belongs_to_a_field() -> None:
    assert set(NEUTRAL) <= OTHERS
