"""Reads the tokenizer and the sampling settings from the metadata of a GGUF file.

transformers' own reader needs half a gigabyte and nine seconds for a large file, and would run several times.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from smoe.errors import UnsupportedModelError
from smoe.memory.gguf_header import GgufHeader
from smoe.models.config_file import check_values
from smoe.models.files import naming
from smoe.models.gguf_backend import add_whole_tokens, by_scores, byte_level, unsplit
from smoe.models.gguf_families import FAMILIES, architecture_of
from smoe.models.gguf_splits import SPLITS, UNSPLIT, Split
from smoe.models.gguf_vocabulary import NORMAL, Vocabulary, read_vocabulary

_log = logging.getLogger(__name__)

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""{transformers' name of a special token: the metadata entry with its id}."""
_OF_SCORES = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
"""The default ids of special tokens in a vocabulary with scores."""
_TEMPLATE = "tokenizer.chat_template"
_STRIPPED_AFTER = ("phi-3", "phi3")
"""Models whose control tokens include the spaces after them, by the model's name in the file."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class _Uncopied:
    """A tokenizer whose copy is the tokenizer itself. transformers copies the object that it gets, which takes 0.5 s
    for 150,000 tokens."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self._backend


def read_gguf_tokenizer(header: GgufHeader) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a GGUF file contains, with its chat template.

    Raises `CheckpointError` if the file has no usable tokenizer, and `UnsupportedModelError` if the kind of vocabulary
    or the pre-tokenizer is not supported.
    """
    vocabulary = read_vocabulary(header)
    is_byte_level = vocabulary.model == "gpt2" and vocabulary.entry("pre") not in UNSPLIT
    split = _split_of(vocabulary) if is_byte_level else None
    with naming(f"{header.path} has no usable tokenizer"):
        numbers = _special_numbers(vocabulary)
        backend = _backend(vocabulary, split)
        name = str(header.metadata.get("general.name", "")).lower()
        add_whole_tokens(backend, vocabulary, strips_right=any(each in name for each in _STRIPPED_AFTER))
        # transformers looks up a named tokenizer on the hub, so the name is set only at the end
        settings = _settings(vocabulary, split, numbers)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_Uncopied(backend), **settings)
        tokenizer.name_or_path = str(header.path)
        tokenizer("a")["input_ids"]
    return tokenizer


def _backend(vocabulary: Vocabulary, split: Split | None) -> Tokenizer:
    """Return the tokenizer for the kind of the vocabulary, without the tokens that are matched as a whole."""
    if split is not None:
        return byte_level(vocabulary, split)
    if vocabulary.model == "gpt2":
        return unsplit(vocabulary)
    kinds = {"llama": by_scores, "gemma4": unsplit}
    if vocabulary.model not in kinds:
        raise UnsupportedModelError(
            f"{vocabulary.header.path} has a vocabulary of the kind {vocabulary.model!r:.80}; smoe reads GGUF files "
            f"with vocabularies of the kinds gpt2, {', '.join(kinds)}: take the model's safetensors release"
        )
    return kinds[vocabulary.model](vocabulary)


def _split_of(vocabulary: Vocabulary) -> Split:
    """Return the pre-tokenizer of a byte-level vocabulary. It is the pre-tokenizer that the file names, or that of the
    model's family if the file names none."""
    path, name = vocabulary.header.path, vocabulary.entry("pre")
    usual = FAMILIES[architecture_of(vocabulary.header)].split if name is None else None
    if usual is not None:
        name = usual
        _log.warning(
            "%s does not state how it splits texts (tokenizer.ggml.pre): %r is assumed, as in other files of its "
            "family; if that is wrong, the model works less well, and a newer GGUF file of the model may state the "
            "split",
            path,
            name,
        )
    if not isinstance(name, str) or name not in SPLITS:
        raise UnsupportedModelError(
            f"{path} splits texts by {name!r:.80} (tokenizer.ggml.pre), which smoe does not know: its tokens would "
            "differ from those that the model was trained with; take a file with a known split "
            f"({', '.join(sorted(SPLITS))}), or the model's safetensors release"
        )
    return SPLITS[name]


def _special_numbers(vocabulary: Vocabulary) -> dict[str, int]:
    """Return {transformers' name of a special token: its id}."""
    count = len(vocabulary.tokens)
    usual = {key: n for key, n in _OF_SCORES.items() if n < count} if vocabulary.model == "llama" else {}
    found: dict[str, int] = {}
    for name, key in _SPECIAL.items():
        number = vocabulary.entry(key)
        number = usual.get(key) if number is None else number
        if number is None:
            continue
        if not isinstance(number, int) or not 0 <= number < count:
            raise ValueError(
                f"the metadata entry {key} is token {number!r:.40}, but the vocabulary has only {count} tokens"
            )
        found[name] = number
    return found


def _settings(vocabulary: Vocabulary, split: Split | None, numbers: dict[str, int]) -> dict[str, Any]:
    """Return the arguments of transformers' tokenizer, except its backend."""
    template = vocabulary.header.metadata.get(_TEMPLATE)
    settings: dict[str, Any] = {"chat_template": template} if isinstance(template, str) else {}
    adds_start = vocabulary.model == "llama" or (split is not None and split.adds_start)
    start, end = vocabulary.entry("add_bos_token"), vocabulary.entry("add_eos_token")
    settings["add_bos_token"] = start if isinstance(start, bool) else adds_start and "bos_token" in numbers
    settings["add_eos_token"] = end is True
    needed = {numbers.get("eos_token"), numbers.get("bos_token") if settings["add_bos_token"] else None}
    for name, number in numbers.items():
        # an ordinary word in the role of a padding token, such as '!', must not become special: decoding would skip it
        if number in needed or vocabulary.kinds is None or vocabulary.kinds[number] != NORMAL:
            settings[name] = vocabulary.tokens[number]
    return settings


def read_sampling(header: GgufHeader) -> dict[str, Any]:
    """Return the sampling settings of a file under the names of generation_config.json; empty if it has none."""
    sampling = {
        name: header.metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in header.metadata
    }
    check_values(sampling, header.path)
    if sampling:
        sampling["do_sample"] = sampling.get("temperature", 1) != 0
    return dict(sampling)
