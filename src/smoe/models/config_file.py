"""Checks a checkpoint's config.json before transformers builds a model from it.

transformers does not check sizes. From a damaged file it would build a billion layers, before any later check could
run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smoe.errors import CheckpointError
from smoe.memory.checkpoint_json import read_object

MAX_LAYERS = 1024
MAX_EXPERTS = 2**16
"""Limits that are several times as large as the largest known models. A larger value means that the file is damaged."""
_SIZES = r"hidden_size|vocab_size|(\w+_)?intermediate_size|(\w+_)?head_dim|num_(\w+_)?(heads|per_tok)"
_BOUNDS = (
    (re.compile(r"n(um)?_(\w+_)?layers?"), MAX_LAYERS),
    (re.compile(r"(\w+_)?n(um)?_(\w+_)?experts?"), MAX_EXPERTS),
    (re.compile(_SIZES), 2**40),
)
_NUMBERS = re.compile(r"rope_theta|(\w+_)?factor|beta_(fast|slow)|mscale(_all_dim)?|(\w+_)?max_position_embeddings")
"""A pattern for names of fields that must be finite numbers. Some are in nested objects that transformers does not
check."""
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
"""The names that families give to the number of experts per token (`_USED`) and of experts per layer (`_EXPERTS`)."""
_DEPTH = 50


def check_config(folder: Path) -> str:
    """Return the `model_type` of a folder's config.json, after checking its sizes and numbers.

    Raise `CheckpointError`, with file and key, if the file is not a configuration, or has impossible sizes or numbers.
    """
    path = folder / "config.json"
    config = read_object(path)
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise CheckpointError(
            f"the field 'model_type' of {path} is {family!r:.80} instead of the name of a model family; download the "
            "file again"
        )
    check_sizes(config, path)
    return family


def check_sizes(value: Any, path: Path, depth: int = 0) -> None:
    """Raise `CheckpointError` if a field of a configuration, or of an object nested in it, has an impossible size."""
    if depth > _DEPTH:
        raise CheckpointError(f"{path} is corrupt: it is nested too deeply; download it again")
    if isinstance(value, list):
        for inner in value:
            check_sizes(inner, path, depth + 1)
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_number(key, inner, path)
        for key, inner in value.items():
            _check_size(key, inner, path)
            check_sizes(inner, path, depth + 1)
        _check_used(value, path)


def check_number(key: str, value: Any, path: Path) -> None:
    """Raise `CheckpointError` if the value of the field `key` is NaN, is infinite (allowed for limits only), or is a
    boolean although the field is a number."""
    is_odd = isinstance(value, float) and not math.isfinite(value)
    if is_odd and (math.isnan(value) or "limit" not in key):
        raise CheckpointError(
            f"{path}: the field {key!r} is {value!r}; it must be a finite number: download the file again"
        )
    names_number = _NUMBERS.fullmatch(key) or any(names.fullmatch(key) for names, _ in _BOUNDS)
    if isinstance(value, bool) and names_number:
        raise CheckpointError(f"{path}: the field {key!r} is {value}; it must be a number: download the file again")


def _check_used(config: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` if a token would use more experts than a layer has."""
    for used in (name for name in _USED if isinstance(config.get(name), int)):
        for experts in (name for name in _EXPERTS if isinstance(config.get(name), int)):
            # zero-computation experts are counted in a field of their own
            most = config[experts] + (config.get("zero_expert_num") or 0)
            if config[used] > most and config[experts] > 0:
                raise CheckpointError(
                    f"{path}: the field {used!r} is {config[used]}; it must be from 1 to {most}, the value of "
                    f"{experts!r}: download the file again"
                )


def _check_size(key: str, value: Any, path: Path) -> None:
    for names, most in _BOUNDS:
        if names.fullmatch(key) and isinstance(value, (int, float)) and not 0 <= value <= most:
            raise CheckpointError(
                f"{path}: the field {key!r} is {value!r:.80}; it must be from 0 to {most}: download the file again"
            )
