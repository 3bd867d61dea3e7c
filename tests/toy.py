"""A toy checkpoint with a tokenizer beside it: what the command line needs, and no download.

The tokenizer has one token for each printable ASCII character, so whatever the random model says is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import zoo

END = "<end>"
ASCII = ["\u010a", "\u0120", *map(chr, range(33, 127))]
"""Newline and space (as byte-level vocabularies write them) and every printable character."""
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def save_toy(
    folder: Path,
    family: str = "qwen2_moe",
    template: str | None = None,
    added: Sequence[AddedToken] = (),
    **overrides: object,
) -> Path:
    """A toy model of `family` and a byte-level tokenizer: one token a byte, an end token, and the `added` ones."""
    tokenizer = ascii_tokenizer(template, added)
    end = tokenizer.convert_tokens_to_ids(END)
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "eos_token_id": end}
    zoo.save(family, folder, **{**settings, **overrides})
    tokenizer.save_pretrained(folder)
    return folder


def ascii_tokenizer(template: str | None = None, added: Sequence[AddedToken] = ()) -> PreTrainedTokenizerFast:
    """One token a character, an end token, and the `added` ones."""
    tokenizer = byte_tokenizer(ASCII, template)
    tokenizer.add_tokens(list(added))
    return tokenizer


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
