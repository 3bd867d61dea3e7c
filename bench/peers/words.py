"""Prompts for programs that take text: so many words, each of which is one token of the model's vocabulary."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from bench.peers.streams import SPECIAL_TOKENS, forced_tokens
from bench.peers.worker import Workload

WORD = re.compile(r"[Ġ▁][a-z]{3,}")
"""An entry that begins with a space and has lower-case letters only: tokenizers split a text before each of them."""


def prompt_texts(gguf: Path, workload: Workload) -> dict[int, str]:
    """The text of every prompt length. They begin alike, and are drawn by the same law as forced tokens."""
    words = draw_words(vocabulary_words(gguf), workload, max(workload.prompts))
    return {length: as_text(words[:length]) for length in sorted(workload.prompts)}


def warmup_text(gguf: Path, workload: Workload) -> str | None:
    """As many words as the warm-up prompt has tokens, from another part of the stream; None without such a prompt."""
    if not workload.warm_up:
        return None
    words = draw_words(vocabulary_words(gguf), workload, max(workload.prompts) + workload.warm_up)
    return as_text(words[-workload.warm_up :])


def as_text(words: list[str]) -> str:
    """A space before each, the first included."""
    return "".join(f" {word}" for word in words)


def draw_words(words: list[str], workload: Workload, count: int) -> list[str]:
    """`count` of `words` by the workload's stream and seed."""
    drawn = forced_tokens(workload.stream, count, workload.seed, len(words) + SPECIAL_TOKENS)
    return [words[number - SPECIAL_TOKENS] for number in drawn]


@functools.cache
def vocabulary_words(gguf: Path) -> list[str]:
    """The words of the model's vocabulary that are one token wherever a space precedes them."""
    from smoe.models.checkpoint import whole_checkpoint  # imports torch: only where a program takes text

    tokenizer = whole_checkpoint(str(gguf), None).tokenizer()
    entries = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    words = [entry[1:] for entry in entries if WORD.fullmatch(entry)]
    ids = tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
    return [word for word, tokens in zip(words, ids, strict=True) if len(tokens) == 1]
