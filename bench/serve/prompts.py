"""Pieces of a text, as prompts that nobody has asked before."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parent.with_name("text.txt").read_text()


def prompt_of(model: str, number: int, tokens: int) -> str:
    """A piece of a text, of so many tokens or hardly fewer, that no other one begins like."""
    tokenizer, ids = _tokenizer(model)
    begin = (number * 211) % (len(ids) // 2)
    text: str = tokenizer.decode((ids[begin:] * 8)[:tokens])
    return text


@functools.cache
def _tokenizer(model: str) -> tuple[Any, list[int]]:
    from smoe.models.checkpoint import whole_checkpoint

    tokenizer = whole_checkpoint(model, None).tokenizer()
    return tokenizer, list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])


def end_of(model: str) -> int | None:
    """The model's end token, which no answer is to have."""
    end = _tokenizer(model)[0].eos_token_id
    return None if end is None else int(end)
