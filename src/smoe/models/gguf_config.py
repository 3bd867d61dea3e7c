"""A model's configuration from the metadata of a GGUF file.

The library's own tables leave out the experts' width and much else, which it then guesses; so which entry means what is
said here. What a file does not say is taken from the shapes of its tensors; what would change the computation, and is
not known here, is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smoe.errors import CheckpointError, NotMoEError, UnsupportedModelError
from smoe.memory.gguf_header import GgufHeader, Value
from smoe.memory.safetensors_index import StoredTensor
from smoe.models.config_file import check_number, check_sizes
from smoe.models.gguf_families import FAMILIES, NEXT_TOKEN_LAYERS, GgufFamily, architecture_of

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
"""The library's names, in all families, of what files say; each family has more (`gguf_families.py`)."""
_SWITCHES = ("expert_weights_norm",)
"""Entries that are true or false; all others that are read so are numbers."""
_NEEDED = ("block_count", "embedding_length", "attention.head_count", "expert_used_count")
_ROUTER = ".ffn_gate_inp."
"""In the names of every router's tensors."""
_WIDTHS = {
    "expert_count": ("blk.0.ffn_gate_inp.weight", -2),
    "expert_feed_forward_length": ("blk.0.ffn_down_exps.weight", -1),
    "expert_shared_feed_forward_length": ("blk.0.ffn_down_shexp.weight", -1),
}
"""What a tensor of the first layer tells where no entry does: its name, and the dimension."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "expert_gating_func": (0, 1),  # not said, softmax
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "logit_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),  # not said, 1
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Values with which an entry changes nothing; with others the family would compute something else."""
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
_THETA = 10_000.0
"""What the format's own program takes where a file says nothing."""
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_SPECIAL = {"bos_token_id": "tokenizer.ggml.bos_token_id", "pad_token_id": "tokenizer.ggml.padding_token_id"}


def gguf_fields(header: GgufHeader, tensors: Mapping[str, StoredTensor]) -> tuple[str, dict[str, Any]]:
    """(the library's family, the fields of its configuration) that a file describes.

    Raises `CheckpointError` with file and entry, `UnsupportedModelError` for what the family does not compute.
    """
    architecture, path = architecture_of(header), header.path
    family = FAMILIES[architecture]
    said = _said(header, architecture, family)
    if not said.get("expert_count") and not any(_ROUTER in key for key in tensors):
        raise NotMoEError(
            f"{path} holds a model of the architecture {architecture!r} that has no routed experts: it is a dense "
            "model, which transformers alone serves as well"
        )
    names = _SIZES | dict(family.sizes)
    values: dict[str, Any] = dict(family.fixed)
    values |= {name: _number(path, key, said[key]) for key, name in names.items() if key in said}
    for key in _NEEDED:
        if key not in said:
            raise CheckpointError(f"{path} lacks the metadata entry '{architecture}.{key}'; download it again")
    check_sizes(values, path)
    values["num_hidden_layers"] -= values.get(NEXT_TOKEN_LAYERS, 0)
    heads = values["num_attention_heads"]
    values.setdefault("num_key_value_heads", heads)
    if "head_dim" in names.values() and heads:
        values.setdefault("head_dim", values["hidden_size"] // heads)
    values |= _shapes(path, family, values, tensors)
    values |= {name: key in tensors for name, key in family.told.items()}
    values |= {name: _token(header, key) for name, key in _SPECIAL.items()}
    ends = [token for token in dict.fromkeys(_token(header, key) for key in _ENDS) if token is not None]
    values["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    values["rope_parameters"] = _rope(path, family, said) | _turned_part(path, family, values, said)
    check_sizes(values, path)
    return family.model_type, values


def _said(header: GgufHeader, architecture: str, family: GgufFamily) -> dict[str, Value]:
    """The architecture's own entries; raises `UnsupportedModelError` for one with which the computation is another."""
    prefix = f"{architecture}."
    said = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    for key, known in _ONLY.items():
        allowed = family.allowed.get(key, known)
        is_switch = isinstance(said.get(key), bool)  # true would pass for 1
        if key not in family.sizes and (is_switch or said.get(key, allowed[0]) not in allowed):
            raise UnsupportedModelError(
                f"{header.path}: '{prefix}{key}' is {said[key]!r:.80}; smoe reads files without it, or where it is "
                f"{allowed[-1]}"
            )
    return said


def _number(path: Path, key: str, value: Value) -> int | float | bool:
    if isinstance(value, bool) != (key in _SWITCHES) or not isinstance(value, (int, float)):
        what = "true or false" if key in _SWITCHES else "one number"
        raise CheckpointError(f"{path}: the metadata entry {key!r} should be {what}; it is {value!r:.80}")
    check_number(key, value, path)
    return value


def _shapes(
    path: Path, family: GgufFamily, values: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """What the tensors tell: the vocabulary, whether the output matrix is the embedding, and sizes that nobody said."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path} has no matrix 'token_embd.weight'; download it again")
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
        raise CheckpointError(f"{header.path}: {key!r} is {token!r:.80}, it must be the number of a token")
    return token


def _turned_part(
    path: Path, family: GgufFamily, values: Mapping[str, Any], said: Mapping[str, Value]
) -> dict[str, Any]:
    """How much of a head positions turn, where that may be less than all of it."""
    heads = values["num_attention_heads"]
    head = values.get("head_dim") or (values["hidden_size"] // heads if heads else 0)
    turned = _number(path, "rope.dimension_count", said.get("rope.dimension_count", head))
    if family.has_partial_rotary and head:
        return {"partial_rotary_factor": turned / head}
    if turned != head:
        raise UnsupportedModelError(
            f"{path}: positions turn {turned} of {head} numbers of a head ('rope.dimension_count'); in transformers' "
            f"{family.model_type!r} they turn all of them"
        )
    return {}


def _rope(path: Path, family: GgufFamily, said: Mapping[str, Value]) -> dict[str, Any]:
    """How positions are turned, as the library writes it."""
    theta = _number(path, "rope.freq_base", said.get("rope.freq_base", _THETA))
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = said.get("rope.scaling.type", "none")
    if kind == "none":
        return parameters
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{path} scales positions by {kind!r:.80}; smoe reads none, linear and yarn")
    parameters |= {"rope_type": kind, "factor": said.get("rope.scaling.factor")}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = said.get("rope.scaling.original_context_length")
        parameters |= {name: said[key] for key, name in _YARN.items() if key in said}
    for key, value in parameters.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key != "rope_type" and not (is_number and 0 < value < math.inf):
            raise CheckpointError(f"{path} scales positions by {kind!r}, but {key} is {value!r:.80}; download it again")
    if kind == "yarn":
        parameters |= family.fixed_yarn
    return parameters
