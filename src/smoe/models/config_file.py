"""A checkpoint's config.json as it stands, looked at before the library builds what it describes.

The library believes sizes: it would make a billion layers, one by one, before anything could be compared.
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
"""Several times those of the largest models known; more in a file means that it is damaged."""
_SIZES = r"hidden_size|vocab_size|(\w+_)?intermediate_size|(\w+_)?head_dim|num_(\w+_)?(heads|per_tok)"
_BOUNDS = (
    (re.compile(r"n(um)?_(\w+_)?layers?"), MAX_LAYERS),
    (re.compile(r"(\w+_)?n(um)?_(\w+_)?experts?"), MAX_EXPERTS),
    (re.compile(_SIZES), 2**40),
)
_NUMBERS = re.compile(r"rope_theta|(\w+_)?factor|beta_(fast|slow)|mscale(_all_dim)?|(\w+_)?max_position_embeddings")
"""Numbers in addition to the sizes above, some in objects whose values the library takes unseen."""
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
"""Under which names families have how many experts a token uses, and how many there are."""
_DEPTH = 50


def check_config(folder: Path) -> str:
    """Refuse a config.json that is none, or whose sizes or numbers are absurd; its `model_type` comes back.

    Raises `CheckpointError` with file and key.
    """
    path = folder / "config.json"
    config = read_object(path)
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise CheckpointError(f"{path} names no family: 'model_type' is {family!r:.80}; download it again")
    check_sizes(config, path)
    return family


def check_sizes(value: Any, path: Path, depth: int = 0) -> None:
    """Raise `CheckpointError` where a configuration, or what is nested in it, has absurd sizes."""
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
    """Raise `CheckpointError` for NaN, for an infinity where it is no limit, and for true or false in place of a
    number."""
    is_odd = isinstance(value, float) and not math.isfinite(value)
    if is_odd and (math.isnan(value) or "limit" not in key):
        raise CheckpointError(f"{path}: {key!r} is {value!r}, it must be a finite number; download it again")
    names_number = _NUMBERS.fullmatch(key) or any(names.fullmatch(key) for names, _ in _BOUNDS)
    if isinstance(value, bool) and names_number:
        raise CheckpointError(f"{path}: {key!r} is {value}, it must be a number; download it again")


def _check_used(config: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` where a token would use more experts than there are."""
    for used in (name for name in _USED if isinstance(config.get(name), int)):
        for experts in (name for name in _EXPERTS if isinstance(config.get(name), int)):
            # experts that compute nothing are counted apart
            most = config[experts] + (config.get("zero_expert_num") or 0)
            if config[used] > most and config[experts] > 0:
                raise CheckpointError(
                    f"{path}: {used!r} is {config[used]}, it must be from 1 to the {most} of {experts!r}; "
                    "download it again"
                )


def _check_size(key: str, value: Any, path: Path) -> None:
    for names, most in _BOUNDS:
        if names.fullmatch(key) and isinstance(value, (int, float)) and not 0 <= value <= most:
            raise CheckpointError(f"{path}: {key!r} is {value!r:.80}, it must be from 0 to {most}; download it again")
