"""Chooses the implementations of attention and experts, whatever a checkpoint's files name.

transformers reads names of implementations from config.json, also from nested configurations. A name with `/` is a hub
repository whose machine code it would download and run. Such names raise an error. Other names are overwritten:
attention is transformers' default (`sdpa`, or `eager` for families without it), and experts are `eager`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from smoe.errors import UnsupportedModelError

_FIELD = re.compile(r".*(implementation|kernel(s|_config|_mapping)?)(_internal)?")


def check_implementations(config: Mapping[str, Any], path: Path) -> None:
    """Raise `UnsupportedModelError` if a configuration, or a nested one, names code on the hub."""
    for field, name in _named(config):
        if "/" in name:
            raise UnsupportedModelError(
                f"{path}: the field {field!r} is {name!r:.80}, which is code on the hub; smoe runs no code that a "
                "checkpoint chooses: remove the field, and the model is computed in the usual way"
            )


def with_own_implementations(config: PretrainedConfig) -> PretrainedConfig:
    """Remove all choices of implementations from a configuration, nested ones included, and return it."""
    config._attn_implementation_internal = None
    config._experts_implementation_internal = "eager"
    for nested in vars(config).values():
        if isinstance(nested, PretrainedConfig):
            with_own_implementations(nested)
    return config


def _named(value: Any, field: str = "", is_choice: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (field, name) for every string in a field that chooses an implementation."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named(inner, f"{field}.{key}" if field else str(key), is_choice or _chooses(str(key)))
            if is_choice and isinstance(key, str):
                yield field, key
    elif isinstance(value, list):
        for inner in value:
            yield from _named(inner, field, is_choice)
    elif isinstance(value, str) and is_choice:
        yield field, value


def _chooses(key: str) -> bool:
    return _FIELD.fullmatch(key) is not None
