"""The tokenizer of a GGUF file, and its settings for the choice of tokens: all from its metadata.

The library's own reader takes half a gigabyte and nine seconds to find the vocabulary of a large file, several times.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from smoe.errors import UnsupportedModelError
from smoe.memory.gguf_header import GgufHeader
from smoe.models.files import naming
from smoe.models.generation_file import check_values
from smoe.models.gguf_backend import add_whole_tokens, by_scores, byte_level, unsplit
from smoe.models.gguf_families import FAMILIES, architecture_of
from smoe.models.gguf_splits import SPLITS, Split
from smoe.models.gguf_vocabulary import NORMAL, Vocabulary, read_vocabulary

_log = logging.getLogger(__name__)

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""The library's names of tokens by the metadata entries that number them."""
_OF_SCORES = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
"""The numbers that go without saying in a vocabulary with scores."""
_TEMPLATE = "tokenizer.chat_template"
_STRIPPED_AFTER = ("phi-3", "phi3")
"""Models, by the name in the file, whose control tokens swallow the spaces after them."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_gguf_tokenizer(header: GgufHeader) -> PreTrainedTokenizerFast:
    """The tokenizer, with its chat template. Raises `CheckpointError` where a file has none, or a broken one, and
    `UnsupportedModelError` for one whose texts would be split in another way than the model was made with."""
    vocabulary = read_vocabulary(header)
    split = _split_of(vocabulary) if vocabulary.model == "gpt2" else None
    with naming(f"{header.path} has no usable tokenizer"):
        numbers = _special_numbers(vocabulary)
        backend = _backend(vocabulary, split)
        name = str(header.metadata.get("general.name", "")).lower()
        add_whole_tokens(backend, vocabulary, strips_right=any(each in name for each in _STRIPPED_AFTER))
        # the library asks the hub about a tokenizer with a name: it gets its name when it is finished
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **_settings(vocabulary, split, numbers))
        tokenizer.name_or_path = str(header.path)
        tokenizer("a")["input_ids"]
    return tokenizer


def _backend(vocabulary: Vocabulary, split: Split | None) -> Tokenizer:
    """The tokenizer of the vocabulary's kind, without the tokens that are found whole in a text."""
    if split is not None:
        return byte_level(vocabulary, split)
    kinds = {"llama": by_scores, "gemma4": unsplit}
    if vocabulary.model not in kinds:
        raise UnsupportedModelError(
            f"{vocabulary.header.path} has a vocabulary of the kind {vocabulary.model!r:.80}; of GGUF files smoe reads "
            f"the kinds gpt2, {', '.join(kinds)}: take the model's safetensors release"
        )
    return kinds[vocabulary.model](vocabulary)


def _split_of(vocabulary: Vocabulary) -> Split:
    """How a byte-level vocabulary splits texts: as the file says, else as its family does."""
    path, name = vocabulary.header.path, vocabulary.entry("pre")
    usual = FAMILIES[architecture_of(vocabulary.header)].split if name is None else None
    if usual is not None:
        name = usual
        _log.warning(
            "%s does not say how it splits texts (tokenizer.ggml.pre): %r is assumed, as in other files of its family; "
            "with another split the model works less well. A newer file of the model says it",
            path,
            name,
        )
    if not isinstance(name, str) or name not in SPLITS:
        raise UnsupportedModelError(
            f"{path} splits texts by {name!r:.80} (tokenizer.ggml.pre), which smoe does not know: tokens would be "
            "others than those the model was made with; take a file with a known split "
            f"({', '.join(sorted(SPLITS))}), or the model's safetensors release"
        )
    return SPLITS[name]


def _special_numbers(vocabulary: Vocabulary) -> dict[str, int]:
    """The numbers of the tokens with a role, by the library's names."""
    count = len(vocabulary.tokens)
    usual = {key: n for key, n in _OF_SCORES.items() if n < count} if vocabulary.model == "llama" else {}
    found: dict[str, int] = {}
    for name, key in _SPECIAL.items():
        number = vocabulary.entry(key)
        number = usual.get(key) if number is None else number
        if number is None:
            continue
        if not isinstance(number, int) or not 0 <= number < count:
            raise ValueError(f"{key} is {number!r:.40}, and there are {count} tokens")
        found[name] = number
    return found


def _settings(vocabulary: Vocabulary, split: Split | None, numbers: dict[str, int]) -> dict[str, Any]:
    """What the library's tokenizer is made with, besides its backend."""
    template = vocabulary.header.metadata.get(_TEMPLATE)
    settings: dict[str, Any] = {"chat_template": template} if isinstance(template, str) else {}
    adds_start = vocabulary.model == "llama" or (split is not None and split.adds_start)
    start, end = vocabulary.entry("add_bos_token"), vocabulary.entry("add_eos_token")
    settings["add_bos_token"] = start if isinstance(start, bool) else adds_start and "bos_token" in numbers
    settings["add_eos_token"] = end is True
    needed = {numbers.get("eos_token"), numbers.get("bos_token") if settings["add_bos_token"] else None}
    for name, number in numbers.items():
        # a word that merely fills places, such as '!', stays a word: decoding would leave it out
        if number in needed or vocabulary.kinds is None or vocabulary.kinds[number] != NORMAL:
            settings[name] = vocabulary.tokens[number]
    return settings


def read_sampling(header: GgufHeader) -> dict[str, Any]:
    """What a file says of choosing tokens, by the names of a generation_config.json; empty where it says nothing."""
    sampling = {
        name: header.metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in header.metadata
    }
    check_values(sampling, header.path)
    if sampling:
        sampling["do_sample"] = sampling.get("temperature", 1) != 0
    return dict(sampling)
