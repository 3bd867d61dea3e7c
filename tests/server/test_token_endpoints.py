"""llama.cpp's endpoints for tokens and properties, and embeddings. Would catch tokens that are not the tokenizer's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smoe.server import local_answers as local
from tests.server.conftest import Running

TEXTS = ["Once upon a time", "", " \u00e9\U0001f600 <|endoftext|> x"]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_the_tokenizers(running: Running, demo_tokenizer: Any, text: str) -> None:
    for fields, expected in (
        ({}, demo_tokenizer(text, add_special_tokens=False)["input_ids"]),
        ({"add_special": True}, demo_tokenizer(text)["input_ids"]),
        (
            {"parse_special": False},
            demo_tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"],
        ),
    ):
        answer = running.http("POST", "/tokenize", {"content": text, **fields})
        assert answer.status == 200 and local.Tokens.model_validate_json(answer.text).tokens == expected
        back = running.http("POST", "/detokenize", {"tokens": expected})
        assert json.loads(back.text) == {"content": text}


def test_pieces_are_texts_or_bytes(running: Running) -> None:
    answer = running.http("POST", "/tokenize", {"content": "Tom \U0001f600", "with_pieces": True})
    pieces = local.Tokens.model_validate_json(answer.text).tokens
    data = b"".join(p.piece.encode() if isinstance(p.piece, str) else bytes(p.piece) for p in pieces)  # type: ignore[union-attr]
    assert data.decode() == "Tom \U0001f600"


def test_the_servers_properties(running: Running) -> None:
    found = local.Properties.model_validate_json(running.http("GET", "/props").text)
    assert found.default_generation_settings == {"n_ctx": 384} and found.total_slots == 4
    assert found.model_alias == "demo" and found.chat_template == running.serving.tokenizer.chat_template


def test_what_is_wrong_is_refused(running: Running) -> None:
    for path, body, param in (
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "x" * 500_001}, "content"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ):
        answer = running.http("POST", path, body)
        assert (answer.status, answer.error["param"]) == (400, param)
    answer = running.http("POST", "/v1/embeddings", {"model": "demo", "input": "x"})
    assert (answer.status, answer.error["code"]) == (501, "no_embeddings")
