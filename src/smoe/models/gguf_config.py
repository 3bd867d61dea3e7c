"""Reads a model's configuration from the metadata of a GGUF file.

transformers' own tables lack the experts' width and other entries, and its defaults would apply instead. The tables
here contain every entry. Missing sizes are taken from the shapes of tensors. An entry that would change the computation
and is not known here raises an error with its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.memory.gguf_header import GgufArray, GgufHeader, read_array
from smoe.memory.safetensors_index import StoredTensor
from smoe.models.config_file import check_sizes
from smoe.models.files import naming
from smoe.models.gguf_families import architecture_of, not_moe
from smoe.models.gguf_family import Entries, GgufFamily

_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}
"""{metadata entry: transformers field} for all families. Each family adds its own (`gguf_families.py`)."""
_NEEDED = ("block_count", "embedding_length", "attention.head_count", "expert_used_count")
_ROUTER = ".ffn_gate_inp."
"""A substring of the names of all router tensors."""
_WIDTHS = {
    "expert_count": ("blk.0.ffn_gate_inp.weight", -2),
    "expert_feed_forward_length": ("blk.0.ffn_down_exps.weight", -1),
    "expert_shared_feed_forward_length": ("blk.0.ffn_down_shexp.weight", -1),
}
"""For sizes that may have no entry: (the tensor of the first layer, the dimension) that has the size."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "expert_gating_func": (0, 1),  # 0 means that the entry is absent: softmax
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "logit_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),  # an absent entry means 1
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Values with which an entry does not change the computation. Other values raise an error, unless the family allows
them."""
_YARN = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_THETA = 10_000.0
"""llama.cpp's default base of rotary frequencies, for files without an entry."""
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_SPECIAL = {"bos_token_id": "tokenizer.ggml.bos_token_id", "pad_token_id": "tokenizer.ggml.padding_token_id"}


def entries_of(header: GgufHeader, tensors: Mapping[str, StoredTensor]) -> Entries:
    """Return the metadata and tensors of a file. Raise `UnsupportedModelError` if smoe does not read its
    architecture."""
    return entries_named(header, architecture_of(header), tensors)


def entries_named(header: GgufHeader, architecture: str, tensors: Mapping[str, StoredTensor]) -> Entries:
    """Return the metadata and tensors of a file of any architecture."""
    prefix = f"{architecture}."
    values = {
        key.removeprefix(prefix): read_array(header, key) if isinstance(value, GgufArray) else value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    return Entries(header.path, architecture, values, tensors)


def next_token_layers(entries: Entries) -> int:
    """Return the number of multi-token prediction layers. The file counts them as layers, and transformers leaves them
    out."""
    return int(entries.number("nextn_predict_layers", 0))


def gguf_fields(header: GgufHeader, family: GgufFamily, entries: Entries) -> tuple[str, dict[str, Any]]:
    """Return (transformers' family name, the fields of the configuration) from a file's metadata.

    Raise `CheckpointError`, with file and entry, if they are invalid. Raise `UnsupportedModelError` if transformers'
    family computes something else.
    """
    path, tensors = entries.path, entries.tensors
    _check_computed(family, entries)
    if not entries.values.get("expert_count") and not any(_ROUTER in key for key in tensors):
        raise not_moe(path, entries.architecture)
    names = {key: name for key, name in (_SIZES | dict(family.sizes)).items() if key not in family.read}
    values: dict[str, Any] = dict(family.fixed)
    values |= {name: entries.number(key) for key, name in names.items() if key in entries.values}
    for key in _NEEDED:
        if key not in family.read:
            entries.number(key)
    check_sizes(values, path)
    values["num_hidden_layers"] -= next_token_layers(entries)
    heads = values.get("num_attention_heads")
    values.setdefault("num_key_value_heads", heads)
    if "head_dim" in names.values() and heads:
        values.setdefault("head_dim", values["hidden_size"] // heads)
    values |= _shapes(path, family, values, tensors)
    values |= {name: key in tensors for name, key in family.from_tensors.items()}
    values |= {name: _token(header, key) for name, key in _SPECIAL.items()}
    ends = [token for token in dict.fromkeys(_token(header, key) for key in _ENDS) if token is not None]
    values["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    values["rope_parameters"] = _rope(family, entries) | _turned_part(family, values, entries)
    if family.complete is not None:
        with naming(f"{path} describes no model of the architecture {entries.architecture!r}"):
            family.complete(entries, values)
    check_sizes(values, path)
    return family.model_type, values


def _check_computed(family: GgufFamily, entries: Entries) -> None:
    """Raise `UnsupportedModelError` if a metadata entry requires a computation that transformers' family does not
    have."""
    for key, allowed in (_ONLY | dict(family.allowed)).items():
        if key in family.sizes or key in family.read:
            continue
        value = entries.values.get(key)
        if value is not None and not any(_is_same(value, each) for each in allowed):
            raise UnsupportedModelError(
                f"{entries.path}: the metadata entry '{entries.architecture}.{key}' is {value!r:.80}; smoe reads "
                f"only files without this entry, or with the value {allowed[-1]}"
            )


def _is_same(value: Any, allowed: Any) -> bool:
    """Return whether a metadata entry's value equals an allowed value. True and 1 count as different."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _shapes(
    path: Path, family: GgufFamily, values: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """Return the configuration fields that follow from the shapes of tensors: the vocabulary size, whether embeddings
    are tied, and sizes that have no metadata entry."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path} has no tensor 'token_embd.weight'; download it again")
    found: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    for entry, (key, dimension) in _WIDTHS.items():
        name, tensor = family.sizes.get(entry), tensors.get(key)
        if name is not None and name not in values and tensor is not None and len(tensor.shape) >= -dimension:
            found[name] = tensor.shape[dimension]
    return found


def _token(header: GgufHeader, key: str) -> int | None:
    token = header.metadata.get(key)
    if token is not None and (not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31):
        raise CheckpointError(
            f"{header.path}: the metadata entry {key!r} is {token!r:.80}; it must be the number of a token: download "
            "the file again"
        )
    return token


def _turned_part(family: GgufFamily, values: Mapping[str, Any], entries: Entries) -> dict[str, Any]:
    """Return the fraction of a head that rotary embeddings rotate, for families in which it varies. In other families,
    raise `UnsupportedModelError` if the fraction is not 1."""
    if family.sizes.get("rope.dimension_count", "head_dim") != "head_dim" or "rope.dimension_count" in family.read:
        return {}
    heads = values["num_attention_heads"]
    head = values.get("head_dim") or (values["hidden_size"] // heads if heads else 0)
    turned = entries.number("rope.dimension_count", head)
    if family.has_partial_rotary and head:
        return {"partial_rotary_factor": turned / head}
    if turned != head:
        raise UnsupportedModelError(
            f"{entries.path}: rotary embeddings rotate {turned} of {head} dimensions of a head "
            f"('rope.dimension_count'); in transformers' {family.model_type!r} they rotate all of them"
        )
    return {}


def _rope(family: GgufFamily, entries: Entries) -> dict[str, Any]:
    """Return the rotary embedding parameters in transformers' form."""
    path, values = entries.path, entries.values
    theta = entries.number("rope.freq_base", _THETA)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return parameters
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{path} scales rotary positions by the method {kind!r:.80}; smoe supports none, linear and yarn: take "
            "the model's safetensors release"
        )
    parameters |= {"rope_type": kind, "factor": values.get("rope.scaling.factor")}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = values.get("rope.scaling.original_context_length")
        parameters |= {name: values[key] for key, name in _YARN.items() if key in values}
    for key, value in parameters.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key != "rope_type" and not (is_number and 0 < value < math.inf):
            raise CheckpointError(
                f"{path} scales rotary positions by the method {kind!r}, but the parameter {key} is {value!r:.80}; "
                "download it again"
            )
    if kind == "yarn":
        parameters |= family.fixed_yarn
    return parameters
