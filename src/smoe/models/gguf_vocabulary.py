"""The vocabulary of a GGUF file: its tokens, their types, merges and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smoe.errors import CheckpointError
from smoe.memory.gguf_header import GgufArray, GgufHeader, read_array

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The types of tokens. Their numbers are those in a file's `token_type`."""
_EMPTY = "[EMPTY_{}]"
"""Replaces tokens that have no text; it occurs in no text."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens and merges of the vocabulary in one GGUF file."""

    header: GgufHeader
    model: str
    """The kind of vocabulary: gpt2, llama or gemma4."""
    tokens: Sequence[str]
    kinds: Sequence[int] | None
    """The type of each token; None if the file does not contain the types."""

    @property
    def numbers(self) -> dict[str, int]:
        """The id of each token by its text."""
        return {token: number for number, token in enumerate(self.tokens)}

    def of_kind(self, *kinds: int) -> list[str]:
        """Return the texts of all tokens of the types `kinds`."""
        return [] if self.kinds is None else [t for t, k in zip(self.tokens, self.kinds, strict=True) if k in kinds]

    def entry(self, name: str) -> Any:
        """Return a metadata entry of the tokenizer, or None if the file lacks it."""
        return self.header.metadata.get(f"tokenizer.ggml.{name}")

    def merges(self) -> list[tuple[str, str]]:
        """Return the pairs of token pieces that the tokenizer merges, in order of priority."""
        found = _array(self.header, "merges", str)
        if found is None:
            raise CheckpointError(f"{self.header.path} has no merges (tokenizer.ggml.merges); download the file again")
        return [_parts(self.header, merge) for merge in found]

    def scores(self) -> list[float]:
        """Return the score of each token; pieces with the highest score are merged first."""
        found = _array(self.header, "scores", (int, float))
        if found is None or len(found) < len(self.tokens):
            raise CheckpointError(
                f"{self.header.path} has {len(found or ())} scores (tokenizer.ggml.scores) for {len(self.tokens)} "
                "tokens; download the file again"
            )
        if any(map(math.isnan, found)):
            raise CheckpointError(
                f"{self.header.path} has a score (tokenizer.ggml.scores) that is not a number; download the file again"
            )
        return found


def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """Return the vocabulary of a file. Raises `CheckpointError` if it is missing or inconsistent."""
    tokens, kinds = _array(header, "tokens", str), _array(header, "token_type", int)
    model = header.metadata.get("tokenizer.ggml.model")
    if not tokens or not isinstance(model, str):
        raise CheckpointError(f"{header.path} has no tokenizer in its metadata; take a GGUF file that has a tokenizer")
    if kinds is not None and len(kinds) < len(tokens):
        raise CheckpointError(
            f"{header.path} has {len(kinds)} entries in tokenizer.ggml.token_type for {len(tokens)} tokens; download "
            "the file again"
        )
    named = [token or _EMPTY.format(number) for number, token in enumerate(tokens)]
    if len(set(named)) < len(named):
        first = {token: number for number, token in reversed(list(enumerate(named)))}
        number, token = next((number, token) for number, token in enumerate(named) if first[token] != number)
        raise CheckpointError(
            f"{header.path} has the token {token!r:.80} twice, as {first[token]} and as {number}; download the file "
            "again"
        )
    kinds = None if kinds is None else kinds[: len(named)]
    return Vocabulary(header, model, named, kinds)


def _array(header: GgufHeader, name: str, kind: type | tuple[type, ...]) -> list[Any] | None:
    """Return an array of the tokenizer's metadata, or None if the file lacks it."""
    key = f"tokenizer.ggml.{name}"
    value = header.metadata.get(key)
    if value is None:
        return None
    found = read_array(header, key) if isinstance(value, GgufArray) else None
    if found is None or not all(issubclass(each, kind) for each in set(map(type, found))):
        raise CheckpointError(
            f"{header.path}: the metadata entry {key!r} is not a list of values of the required type; download the "
            "file again"
        )
    return list(found)


def _parts(header: GgufHeader, merge: str) -> tuple[str, str]:
    """Return both sides of a merge. A space separates them; the first character may itself be a space."""
    left, space, right = merge[1:].partition(" ")
    if not space or not right:
        raise CheckpointError(
            f"{header.path} has the merge {merge!r:.80}, which does not consist of two texts with a space between "
            "them; download the file again"
        )
    return merge[0] + left, right
