"""The tokenizer that a GGUF file brings, and how it wants its text to be chosen: all from its metadata.

The library's own reader takes half a gigabyte and nine seconds to find the vocabulary of a large file, several times;
its converter is given ours.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.memory.gguf_header import GgufArray, GgufHeader, read_array
from smoe.models.files import naming
from smoe.models.generation_file import check_values
from smoe.models.gguf_families import FAMILIES, architecture_of

try:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

    _SPLITS = frozenset({*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2", "olmo"})  # the last two are its converter's own
except ImportError:  # transformers before 5.20
    from transformers.integrations.ggml import convert_gguf_tokenizer

    _SPLITS = frozenset({"qwen2"})

_SAME_SPLIT = {"glm4": "llama-bpe", "chatglm-bpe": "llama-bpe"}
"""Names that transformers does not know for ways to split texts that it does."""
_ENTRIES = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
    "add_prefix_space": "add_space_prefix",
}
_BY_SCORES = "llama"
"""The kind of vocabulary that splits no texts before it puts pieces together, the highest score first."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_gguf_tokenizer(header: GgufHeader) -> PreTrainedTokenizerFast:
    """The tokenizer, with its chat template. Raises `CheckpointError` where a file has none, or a broken one."""
    found = {
        name: read_array(header, key) if isinstance(value, GgufArray) else value
        for name, entry in _ENTRIES.items()
        if (value := header.metadata.get(key := f"tokenizer.ggml.{entry}")) is not None
    }
    if not isinstance(found.get("tokens"), list) or not isinstance(found.get("tokenizer_type"), str):
        raise CheckpointError(f"{header.path} has no tokenizer in its metadata; take a file that has one")
    has_scores = found["tokenizer_type"] == _BY_SCORES
    split = None if has_scores else found.setdefault("pre_tokenizer_type", FAMILIES[architecture_of(header)].split)
    if isinstance(split, str):
        split = found["pre_tokenizer_type"] = _SAME_SPLIT.get(split, split)
    if not has_scores and (not isinstance(split, str) or split not in _SPLITS):
        raise UnsupportedModelError(
            f"{header.path} splits texts by {split!r:.80}, which this version of transformers does not know: tokens "
            "would be others than those the model was made with; a newer one (pip install -U transformers) may"
        )
    settings: dict[str, Any] = {"add_bos_token": True} if has_scores else {}  # early files do not say it
    settings |= {
        name: header.metadata[key]
        for name, key in (("chat_template", _TEMPLATE), ("add_bos_token", "tokenizer.ggml.add_bos_token"))
        if isinstance(header.metadata.get(key), (str, bool))
    }
    with naming(f"{header.path} has no usable tokenizer"):
        settings |= {name: _special(found, f"{name}_id") for name in _SPECIAL}
        backend, more = convert_gguf_tokenizer(architecture_of(header), found)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, name_or_path=str(header.path), **settings | dict(more)
        )
        tokenizer("a")["input_ids"]
    return tokenizer


def read_sampling(header: GgufHeader) -> dict[str, Any]:
    """What a file says of choosing tokens, by the names of a generation_config.json; empty where it says nothing."""
    said = {
        name: header.metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in header.metadata
    }
    check_values(said, header.path)
    if said:
        said["do_sample"] = said.get("temperature", 1) != 0
    return dict(said)


def _special(found: dict[str, Any], key: str) -> str | None:
    number, tokens = found.get(key), found["tokens"]
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ValueError(f"{key} is {number!r:.40}, and there are {len(tokens)} tokens")
    return str(tokens[number])
