"""The tokenizer for grammars: it never encodes required text as an added token.

llguidance tokenizes the text that must come next with the model's own tokenizer. Where that text looks like an added
token (`<tool_call>` of Qwen3, for example in a schema's `const`), the tokenizer returns the added token. An added token
stands for no text in a grammar, so the grammar would allow a token and then refuse it. This tokenizer splits such text
into ordinary tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from llguidance.hf import from_tokenizer


def grammar_tokens(tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> LLTokenizer:
    """Return the tokenizer that grammars are compiled for. A vocabulary of 150,000 tokens takes a second or two."""
    plain = TokenizerWrapper(_PlainText(tokenizer, vocabulary, ends))
    return LLTokenizer(plain, n_vocab=vocabulary, eos_token=list(ends))


class _PlainText:
    """The interface that llguidance requires of a tokenizer: the bytes of every token, and the tokens of a text."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._own = from_tokenizer(tokenizer, vocabulary, list(ends), slices=[])
        self.eos_token_id = ends[0]
        self.tokens = [self._own.decode_bytes([token]) for token in range(vocabulary)]
        self._special = {token for token in range(vocabulary) if self._own.is_special_token(token)}
        self.special_token_ids = sorted(self._special)

    def __call__(self, text: str) -> list[int]:
        tokens = self._own.tokenize_str(text)
        return tokens if self._special.isdisjoint(tokens) else self._own.greedy_tokenize(text)
