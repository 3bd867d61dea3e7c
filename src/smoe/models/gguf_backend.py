"""The tokenizers library's tokenizer for a vocabulary of a GGUF file: one function for each kind of vocabulary.

Ids are those of llama.cpp and of the models' own tokenizers; transformers' converter of GGUF files knows fewer kinds,
and loses a space before a text, words that no merge reaches, and control tokens in letters beyond the byte alphabet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from smoe.models.gguf_splits import Split
from smoe.models.gguf_vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

_SPACE = "\u2581"
"""How vocabularies that are not byte-level write a space."""


def byte_level(vocabulary: Vocabulary, split: Split) -> Tokenizer:
    """Texts are split by expressions; every byte of a piece has a letter, and letters are merged."""
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
    """A text is one piece, with a space put before it; pieces are put together by score, and what is left is bytes."""
    has_prefix = vocabulary.entry("add_space_prefix") is not False
    tokenizer = Tokenizer(_with_bytes(vocabulary, _merges_by_scores(vocabulary)))
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = _space_decoder(has_prefix)
    return tokenizer


def unsplit(vocabulary: Vocabulary) -> Tokenizer:
    """Gemma 4's: merges as in byte-level vocabularies, but of characters, over a text that is split nowhere."""
    tokenizer = Tokenizer(_with_bytes(vocabulary, vocabulary.merges()))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = _space_decoder(has_prefix=False)
    return tokenizer


def add_whole_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, strips_right: bool) -> None:
    """Let the tokens be found whole in texts that are no pieces of them: control tokens, which decoding may leave out,
    and those of a user, which it may not."""
    special = vocabulary.of_kind(CONTROL, UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, rstrip=strips_right) for each in special])
    own = vocabulary.of_kind(USER_DEFINED)
    tokenizer.add_tokens([AddedToken(each, normalized=False, special=False) for each in own])


def _with_bytes(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> models.BPE:
    """A model that writes a character without a token as its bytes."""
    number = vocabulary.entry("unknown_token_id")
    unknown = vocabulary.tokens[number] if number is not None else None
    return models.BPE(vocab=vocabulary.numbers, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _merges_by_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to put an entry together of two others, the highest score first."""
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
    """Decodes pieces to a text: without the space that was put before it."""
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])


def _respelled(vocabulary: Vocabulary) -> Iterable[decoders.Decoder]:
    """Spells the tokens of a user that consist of letters of the byte alphabet, as DeepSeek's 'ü', by their bytes: the
    decoder would take each letter for a byte."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    for token in vocabulary.of_kind(CONTROL, UNKNOWN, USER_DEFINED):
        if not token.isascii() and set(token) <= set(letters):
            spelled = "".join(piece for piece, _ in _BYTES.pre_tokenize_str(token))
            yield decoders.Replace(Regex(rf"\A{re.escape(token)}\z"), spelled)


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
