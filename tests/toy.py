"""A toy checkpoint with a tokenizer beside it: what the command line needs, and no download.

The tokenizer has one token for each printable ASCII character, so whatever the random model says is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import zoo

END = "<end>"
ASCII = ["\u010a", "\u0120", *map(chr, range(33, 127))]
"""Newline and space (as byte-level vocabularies write them) and every printable character."""
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def save_toy(folder: Path, family: str = "qwen2_moe", template: str | None = None, **overrides: object) -> Path:
    """A toy model of `family` and a byte-level tokenizer: one token a byte, and an end token."""
    tokenizer = ascii_tokenizer(template)
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "eos_token_id": len(tokenizer) - 1}
    zoo.save(family, folder, **{**settings, **overrides})
    tokenizer.save_pretrained(folder)
    return folder


def ascii_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a character, and an end token."""
    return byte_tokenizer(ASCII, template)


def byte_tokenizer(
    letters: Sequence[str], template: str | None = None, merges: Sequence[tuple[str, str]] = ()
) -> PreTrainedTokenizerFast:
    """One token for each of `letters` of the byte-level alphabet, an end token, and one for every merge."""
    words = [*letters, END, *("".join(pair) for pair in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = template
    return fast
