"""What is said of fields that are wrong. Would catch a message that does not say what was given and what is allowed, or
a code that programs do not know; and a client's own words that come back without a bound."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from smoe.errors import ConfigError, ContextError
from smoe.server.api_errors import ApiError, problem_of
from smoe.server.field_errors import refusal_of
from smoe.server.fields import ChatAsked, CompletionAsked, RequestFields
from smoe.server.response_fields import ResponseAsked

SAID = [{"role": "user", "content": "x"}]
MANY = dict.fromkeys(map(str, range(1025)), 0)
FIRST: dict[type[RequestFields], dict[str, Any]] = {
    ChatAsked: {"model": "demo", "messages": SAID},
    CompletionAsked: {"model": "demo", "prompt": "x"},
    ResponseAsked: {"model": "demo", "input": "x"},
}


def refused(kind: type[RequestFields], fields: Any) -> ApiError:
    body = FIRST[kind] | fields if isinstance(fields, dict) else fields
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    return refusal_of(kind, error.value, body)


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        ({"n": 0}, "n", "integer_below_min_value", "'n' is 0; it must be a whole number between 1 and 128"),
        ({"n": "two"}, "n", "invalid_type", "'n' is \"two\"; it must be a whole number between 1 and 128"),
        ({"n": True}, "n", "invalid_type", "'n' is true; it must be a whole number between 1 and 128"),
        ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value", "is 21; it must be a whole number"),
        ({"temperature": 2.5}, "temperature", "decimal_above_max_value", "is 2.5; it must be a number between 0 and 2"),
        ({"top_p": -1}, "top_p", "decimal_below_min_value", "'top_p' is -1; it must be a number between 0 and 1"),
        ({"top_k": -2}, "top_k", "integer_below_min_value", "'top_k' is -2; it must be a whole number of at least -1"),
        ({"min_p": 1.5}, "min_p", "decimal_above_max_value", "'min_p' is 1.5; it must be a number between 0 and 1"),
        ({"max_tokens": 0}, "max_tokens", "integer_below_min_value", "it must be a whole number of at least 1"),
        ({"messages": []}, "messages", "empty_array", "is an empty list; it must be a list of 1 to 10000 objects"),
        ({"messages": [5]}, "messages[0]", "invalid_type", "'messages[0]' is 5; it must be an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter", "you must provide"),
        ({"messages": [{"role": 5}]}, "messages[0].role", "invalid_type", "it must be one of: \"assistant\", "),
        ({"messages": [{"role": "function"}]}, "messages[0].role", "invalid_value",
         '"function"; it must be one of: "assistant", "developer", "system", "tool", "user"'),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call",
         "unsupported_parameter",
         "it must be left out"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type", "is \"5\"; it must be a whole number of at least 1"),
        ({"max_tokens": True}, "max_tokens", "invalid_type", "is true; it must be a whole number of at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type", "is 1.5; it must be a whole number of at least 1"),
        ({"n": 1.5}, "n", "invalid_type", "'n' is 1.5; it must be a whole number between 1 and 128"),
        ({"response_format": {"type": 5}}, "response_format.type", "invalid_type", "one of: \"text\", \"json_"),
        ({"logprobs": "x"}, "logprobs", "invalid_type", "it must be true or false"),
        ({"stop": ["x", 5]}, "stop", "invalid_type", "it must be a string"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content", "missing_required_parameter", "you must provide"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type", "a string or a list"),
        ({"stop": ["x"] * 17}, "stop", "array_above_max_length", "'stop' is a list of 17; it must be a string"),
        ({"stop": "x" * 257}, "stop", "string_above_max_length", "it must be a string of at most 256 characters"),
        ({"stop": 5}, "stop", "invalid_type", "'stop' is 5; it must be a string"),
        ({"tools": [{}]}, "tools[0].type", "missing_required_parameter", "you must provide 'tools[0].type'"),
        ({"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools[0].type", "invalid_value", "\"function\""),
        ({"logit_bias": {"5": 101}}, "logit_bias", "decimal_above_max_value", "'logit_bias.5' is 101; it must be"),
        ({"logit_bias": MANY}, "logit_bias", "object_above_max_properties", "is an object of 1025 fields; it must be"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value", "one of: \"text\", \"json_"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type", "true or false"),
        ([1, 2], None, None, "the body must be a JSON object; it is [1, 2]"),
    ],
)  # fmt: skip
def test_what_was_given_and_what_is_allowed(fields: Any, param: str | None, code: str | None, message: str) -> None:
    found = refused(ChatAsked, fields)
    assert (found.status, found.param, found.code) == (400, param, code)
    assert message in found.message


def test_of_a_union_what_comes_nearest_is_told() -> None:
    for prompt, code in (
        ([], "empty_array"),
        ([1, -1], "integer_below_min_value"),
        (["x"] * 129, "array_above_max_length"),
    ):
        found = refused(CompletionAsked, {"prompt": prompt})
        assert (found.param, found.code) == ("prompt", code) and "1 to 128 strings" in found.message
    assert refused(ResponseAsked, {"input": 5}).message == "'input' is 5; it must be a string or a list of objects"


def test_words_of_a_client_have_a_bound() -> None:
    for fields in (
        {"temperature": "x" * 100_000},
        {"temperature": ["x"] * 100_000},
        {"logit_bias": {"x" * 100_000: 101}},
        {"messages": [{"role": "x" * 100_000}]},
    ):
        found = refused(ChatAsked, fields)
        assert len(found.message) < 400 and len(found.param or "") < 120


def test_a_setting_of_the_library_is_told_by_the_requests_own_name() -> None:
    settings = ChatAsked.model_validate(FIRST[ChatAsked]).settings
    assert settings["max_new_tokens"] == "max_tokens"
    settings = ChatAsked.model_validate(FIRST[ChatAsked] | {"max_completion_tokens": 5}).settings
    found = problem_of(ConfigError.out_of_bounds("max_new_tokens", 0, "at least 1"), settings)
    assert (found.status, found.param, found.code) == (400, "max_completion_tokens", "invalid_value")
    assert found.message == "'max_completion_tokens' is 0; it must be at least 1"
    found = problem_of(ContextError("the prompt has 500 tokens", setting="context_tokens", given=384), settings)
    assert (found.status, found.param, found.code) == (400, "messages", "context_length_exceeded")
    assert "384" in found.message and "500" in found.message


def test_a_setting_that_no_request_has_is_no_fault_of_whoever_asks() -> None:
    settings = CompletionAsked.model_validate(FIRST[CompletionAsked]).settings
    found = problem_of(ConfigError.out_of_bounds("max_sequences", 9, "at most 4"), settings)
    assert (found.status, found.param, found.code) == (500, None, "internal_error")
