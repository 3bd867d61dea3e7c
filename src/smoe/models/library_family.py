"""Finds the transformers family for a config.json whose `model_type` transformers lacks, by the field `architectures`.

For example, Kimi K2 is published as `kimi_k2` with code of its own (`auto_map`), and has the architecture of
DeepSeek-V3. transformers' class of that name computes it. Code in a repository is never executed.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        own_code = ", and the repository's own code ('auto_map') is not executed" if fields.get("auto_map") else ""
        raise UnsupportedModelError(
            f"{folder / 'config.json'}: transformers has neither the family {fields.get('model_type')!r:.80} nor a "
            f"class {fields.get('architectures')!r:.80}{own_code}; docs/families.md lists what works"
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return config


def _of_family(fields: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the fields with `family` as their `model_type`, without the reference to the repository's code."""
    return {key: value for key, value in fields.items() if key not in ("auto_map", "model_type")} | {
        "model_type": family
    }
