"""Reads transformers' configuration from a config.json: of which family, and with which implementations.

The field `architectures` gives the family of a `model_type` that transformers lacks. For example, Kimi K2 is published
as `kimi_k2` with code of its own (`auto_map`), and has the architecture of DeepSeek-V3. transformers' class of that
name computes it. Code in a repository is never executed.

transformers reads names of implementations from config.json, also from nested configurations. A name with `/` is a hub
repository whose machine code it would download and run. Such names raise an error. Other names are overwritten:
attention is transformers' default (`sdpa`, or `eager` for families without it), and experts are `eager`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from smoe.errors import UnsupportedModelError
from smoe.models.config_doubts import read_as
from smoe.models.library_names import unknown_family


def family_by_architecture(fields: Mapping[str, Any]) -> str | None:
    """Return the family whose class `architectures` names, or None if `model_type` is known or no class matches."""
    if fields.get("model_type") in CONFIG_MAPPING:
        return None
    named = fields.get("architectures")
    wanted = set(map(str, named)) if isinstance(named, list) else set()
    for classes in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for family, name in classes.items():
            if name in wanted and family in CONFIG_MAPPING:
                return str(family)
    return None


def family_doubts(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the remark that a config.json of an unknown family is read as one of a known family."""
    family = family_by_architecture(fields)
    return () if family is None else (read_as(fields, family),)


def read_library_config(folder: Path, fields: Mapping[str, Any]) -> PretrainedConfig:
    """Return transformers' configuration of a model in a folder. `fields`: the fields of its config.json.

    Raises `UnsupportedModelError` for a family that transformers lacks.
    """
    family = family_by_architecture(fields)
    config: PretrainedConfig
    if family is not None:
        config = CONFIG_MAPPING[family].from_dict(_of_family(fields, family))
        config._name_or_path = str(folder)
        return config
    if fields.get("model_type") not in CONFIG_MAPPING:
        raise unknown_family(folder / "config.json", fields)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return config


def _of_family(fields: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the fields with `family` as their `model_type`, without the reference to the repository's code."""
    return {key: value for key, value in fields.items() if key not in ("auto_map", "model_type")} | {
        "model_type": family
    }


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
