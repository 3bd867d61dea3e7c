"""Builds a tokenizer of the tokenizers library from the vocabulary of a GGUF file, with one function for each kind of
vocabulary.

Token ids equal those of llama.cpp and of the models' own tokenizers. transformers' converter of GGUF files supports
fewer kinds. It also loses the space before a text, words that no merge reaches, and control tokens with letters outside
the byte alphabet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from smoe.models.gguf_splits import Split
from smoe.models.gguf_vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

_SPACE = "\u2581"
"""The character for a space in vocabularies that are not byte-level."""


def byte_level(vocabulary: Vocabulary, split: Split) -> Tokenizer:
    """Return a byte-level BPE tokenizer. Regular expressions split the text, each byte becomes a letter, and letters
    are merged."""
    model = models.BPE(vocab=vocabulary.numbers, merges=vocabulary.merges(), ignore_merges=split.ignores_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence([*_respelled(vocabulary), decoders.ByteLevel()])
    return tokenizer


def by_scores(vocabulary: Vocabulary) -> Tokenizer:
    """Return a tokenizer like SentencePiece's. It merges pieces of the whole text by their scores, and encodes
    characters without a token as bytes."""
    has_prefix = vocabulary.entry("add_space_prefix") is not False
    tokenizer = Tokenizer(_with_bytes(vocabulary, _merges_by_scores(vocabulary)))
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = _space_decoder(has_prefix)
    return tokenizer


def unsplit(vocabulary: Vocabulary) -> Tokenizer:
    """Return a tokenizer like Gemma 4's, which applies BPE merges to the characters of the whole text without splitting
    the text first."""
    tokenizer = Tokenizer(_with_bytes(vocabulary, vocabulary.merges()))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = _space_decoder(has_prefix=False)
    return tokenizer


def add_whole_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, strips_right: bool) -> None:
    """Add tokens to a tokenizer that are never merged from pieces: control tokens, which decoding may skip, and
    user-defined tokens."""
    special = vocabulary.of_kind(CONTROL, UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, rstrip=strips_right) for each in special])
    own = vocabulary.of_kind(USER_DEFINED)
    tokenizer.add_tokens([AddedToken(each, normalized=False, special=False) for each in own])


def _with_bytes(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> models.BPE:
    """Return a BPE model that encodes a character without a token as its bytes."""
    number = vocabulary.entry("unknown_token_id")
    unknown = vocabulary.tokens[number] if number is not None else None
    return models.BPE(vocab=vocabulary.numbers, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _merges_by_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, by descending score."""
    apart = {*vocabulary.of_kind(CONTROL, UNKNOWN, BYTE)}
    numbers = {token: number for token, number in vocabulary.numbers.items() if token not in apart}
    scores = vocabulary.scores()
    found = [
        (-scores[number], -cut, -(len(token) - cut), token[:cut], token[cut:])
        for token, number in numbers.items()
        for cut in range(1, len(token))
        if token[:cut] in numbers and token[cut:] in numbers
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _space_decoder(has_prefix: bool) -> decoders.Decoder:
    """Return the decoder for vocabularies with `_SPACE`; with `has_prefix` it removes the added space."""
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])


def _respelled(vocabulary: Vocabulary) -> Iterable[decoders.Decoder]:
    """Yield decoders for added tokens that consist of letters of the byte alphabet, such as the token 'ü' of DeepSeek.

    The byte-level decoder would take each letter of such a token for a byte. So the letters are replaced by those that
    stand for their bytes.
    """
    letters = pre_tokenizers.ByteLevel.alphabet()
    for token in vocabulary.of_kind(CONTROL, UNKNOWN, USER_DEFINED):
        if not token.isascii() and set(token) <= set(letters):
            spelled = "".join(piece for piece, _ in _BYTES.pre_tokenize_str(token))
            yield decoders.Replace(Regex(rf"\A{re.escape(token)}\z"), spelled)


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
