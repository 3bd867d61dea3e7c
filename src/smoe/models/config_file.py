"""A checkpoint's config.json as it stands, looked at before the library builds what it describes.

The library believes sizes: it would make a billion layers, one by one, before anything could be compared.
"""

from __future__ import annotations

import re
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
    (re.compile(r"(\w+_)?num_(\w+_)?experts?"), MAX_EXPERTS),
    (re.compile(_SIZES), 2**40),
)
_DEPTH = 50


def check_config(folder: Path) -> str:
    """Refuse a config.json that is none, or whose sizes are absurd; its `model_type` comes back.

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
            _check_size(key, inner, path)
            check_sizes(inner, path, depth + 1)


def _check_size(key: str, value: Any, path: Path) -> None:
    for names, most in _BOUNDS:
        if names.fullmatch(key) and isinstance(value, (int, float)) and not 0 <= value <= most:
            raise CheckpointError(f"{path}: {key!r} is {value!r:.80}, it must be from 0 to {most}; download it again")
