"""Grammars as the decode loop uses them, beside JSON's own parser. Would catch a mask that lies beside its tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from smoe.server.api_errors import ApiError
from smoe.server.grammar import Grammars, closed
from tests.toy import END, ascii_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "ages": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}


def grammars() -> tuple[Any, Grammars]:
    tokenizer = ascii_tokenizer()
    return tokenizer, Grammars(tokenizer, len(tokenizer) + 7, [tokenizer.convert_tokens_to_ids(END)])


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_drawn_keeps_to_the_schema(seed: int) -> None:
    tokenizer, made = grammars()
    first = made.of_schema(PERSON, "response_format")
    generator = torch.Generator().manual_seed(seed)
    for grammar in (first.another(), first):  # what one text has taken is not the other's
        ids: list[int] = []
        while not ids or ids[-1] != tokenizer.convert_tokens_to_ids(END):
            logits = torch.randn(len(tokenizer) + 9, generator=generator)
            grammar.narrow(logits)
            assert torch.isinf(logits[len(tokenizer) :]).all()
            ids.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
            grammar.take(ids[-1])
            assert len(ids) < 200
        value = json.loads(tokenizer.decode(ids[:-1]))
        assert set(value) == {"name", "ages"} and len(value["name"]) <= 5
        assert len(value["ages"]) <= 3 and set(value["ages"]) <= {1, 22}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "king"},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "("},
        {"enum": []},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"description": "x" * 300_000},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$anchor": "a", "$ref": "#a"},
        {"anyOf": [{"$ref": "#"}]},
    ],
    ids=range(9),
)
def test_what_cannot_be_kept_to_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        grammars()[1].of_schema(schema, "response_format")
    assert (refused.value.status, refused.value.param) == (400, "response_format")


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("text", ["<tool_call>", "a <tool_call>{}</tool_call>", END])
def test_text_that_looks_like_an_added_token_is_text(text: str, is_special: bool) -> None:
    marks = [AddedToken(mark, special=is_special) for mark in ("<tool_call>", "</tool_call>")]
    tokenizer = ascii_tokenizer(added=marks)
    end = tokenizer.convert_tokens_to_ids(END)
    grammar = Grammars(tokenizer, len(tokenizer), [end]).of_schema({"const": text}, "response_format")
    written = ""
    while not written.endswith('"') or len(written) == 1:
        logits = torch.zeros(len(tokenizer))
        grammar.narrow(logits)
        grammar.take(int(logits.argmax()))
        written += tokenizer.decode([int(logits.argmax())])
    assert json.loads(written) == text


def test_a_model_without_an_end_keeps_to_nothing() -> None:
    with pytest.raises(ApiError, match="no end-of-text token"):
        Grammars(ascii_tokenizer(), 98, []).of_schema({"type": "object"}, "response_format")


def test_a_model_that_never_ends_a_text_cannot_be_held_to_a_form() -> None:
    tokenizer = ascii_tokenizer()
    with pytest.raises(ApiError, match="no end-of-text token") as error:
        Grammars(tokenizer, len(tokenizer), []).of_schema(PERSON, "text.format")
    assert (error.value.param, error.value.status) == ("text.format", 400)


def test_a_chain_of_references_may_be_as_long_as_a_schema() -> None:
    """The compiler goes down by recursion: with a thread's usual stack it would end the process."""
    chain: list[dict[str, Any]] = [{"properties": {"a": {"$ref": f"#/a/{number + 1}"}}} for number in range(4000)]
    _, made = grammars()
    made.of_schema({"$ref": "#/a/0", "a": [*chain, {}]}, "response_format")


def test_objects_have_the_properties_that_a_schema_lists() -> None:
    """Unless it says otherwise. Would catch keys that a model adds until the text is cut off."""
    inner = {"properties": {"enum": {"type": "integer"}}}
    schema = {
        "properties": {"a": inner, "b": {"type": "array", "items": inner}, "c": {"default": {"properties": {}}}},
        "$defs": {"D": inner, "open": {**inner, "additionalProperties": True}, "all": {"allOf": [inner, inner]}},
    }
    shut = {**inner, "additionalProperties": False}
    assert closed(schema) == {
        "properties": {"a": shut, "b": {"type": "array", "items": shut}, "c": {"default": {"properties": {}}}},
        "$defs": {"D": shut, "open": schema["$defs"]["open"], "all": schema["$defs"]["all"]},
        "additionalProperties": False,
    }
    assert closed({"type": "object"}) == {"type": "object"}
