"""Texts and bytes of single tokens, for responses with probabilities."""

from __future__ import annotations

import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_CHARACTER = "\ufffd"


class TokenTexts:
    """The texts of single tokens of one tokenizer, in a cache."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token: int) -> tuple[str, list[int]]:
        """Return the text and the bytes of a token. If the token is only a part of a character, its bytes are those of
        its vocabulary entry."""
        if token not in self._known:
            text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            known = _bytes_of(self._tokenizer.convert_ids_to_tokens(token)) if _NO_CHARACTER in text else None
            self._known[token] = text, list(text.encode("utf8") if known is None else known)
        return self._known[token]


def _bytes_of(piece: str | None) -> bytes | None:
    """Return the bytes of a vocabulary entry; None if the vocabulary does not represent bytes."""
    if piece is None:
        return None
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    letters = _letters()
    return bytes(letters[letter] for letter in piece) if all(letter in letters for letter in piece) else None


def _letters() -> dict[str, int]:
    """Return {character: byte} for GPT-2's alphabet, in which every byte has a printable character."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
