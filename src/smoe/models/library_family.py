"""The family of the library that a config.json means by its `architectures`, where its `model_type` is of none.

Kimi K2 is published as `kimi_k2` with code of its own in `auto_map`, and is DeepSeek-V3 by its architecture: the
library's class of that name serves it. Code that lies in a repository is never executed.
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
    """The library's family whose class `architectures` names; None where `model_type` is a family already, no class is
    known by these names, or no code is said to stand for the family: its name may then be damaged."""
    if fields.get("model_type") in CONFIG_MAPPING or not fields.get("auto_map"):
        return None
    named = fields.get("architectures")
    wanted = set(map(str, named)) if isinstance(named, list) else set()
    for classes in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for family, name in classes.items():
            if name in wanted and family in CONFIG_MAPPING:
                return str(family)
    return None


def family_doubts(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """How a config.json of a family that the library lacks is read."""
    family = family_by_architecture(fields)
    return () if family is None else (read_as(fields, family),)


def read_library_config(folder: Path, fields: Mapping[str, Any]) -> PretrainedConfig:
    """The library's configuration of a folder whose config.json is `fields`. Raises `UnsupportedModelError` for a
    family that only code in the repository knows."""
    family = family_by_architecture(fields)
    config: PretrainedConfig
    if family is not None:
        config = CONFIG_MAPPING[family].from_dict(_of_family(fields, family))
        config._name_or_path = str(folder)
        return config
    if fields.get("model_type") not in CONFIG_MAPPING and fields.get("auto_map"):
        raise UnsupportedModelError(
            f"{folder / 'config.json'}: transformers has neither the family {fields['model_type']!r:.80} nor a class "
            f"{fields.get('architectures')!r:.80}, and the repository's own code ('auto_map') is not executed; "
            "docs/families.md lists what works"
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return config


def _of_family(fields: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The same fields as the library's own, without the code that is not executed."""
    return {key: value for key, value in fields.items() if key not in ("auto_map", "model_type")} | {
        "model_type": family
    }
