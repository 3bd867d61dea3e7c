"""Tokens as clients see them. Would catch half a character whose bytes are those of the replacement character."""

from __future__ import annotations

from typing import Any

import pytest

from smoe.server.token_text import TokenTexts
from tests.toy import byte_tokenizer

EURO = ["\u00e2", "\u0124", "\u00ac"]
"""The bytes of the euro sign, e2 82 ac, as byte-level vocabularies write them."""


def test_half_characters_have_their_bytes() -> None:
    tokenizer = byte_tokenizer([*EURO, "a", "\u0120"])
    ids = tokenizer("\u20ac a")["input_ids"]
    found = [TokenTexts(tokenizer).of(token) for token in ids]
    assert [text for text, _ in found] == ["\ufffd", "\ufffd", "\ufffd", " ", "a"]
    assert bytes(byte for _, data in found for byte in data).decode() == "\u20ac a"


class Sentencepiece:
    """Writes bytes as `<0xE2>`."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "\ufffd" if ids[0] < 256 else "\u2581word"

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return f"<0x{token:02X}>" if token < 256 else None


@pytest.mark.parametrize(("token", "data"), [(0xE2, b"\xe2"), (0, b"\x00"), (300, "\u2581word".encode())])
def test_bytes_of_other_vocabularies(token: int, data: bytes) -> None:
    assert bytes(TokenTexts(Sentencepiece()).of(token)[1]) == data
