"""Registers model families that transformers lacks, and finds our versions of families whose experts cannot be
replaced.

transformers looks up a `model_type` in its own tables first. A class registered there takes precedence over the
checkpoint's `auto_map`, so no remote code runs and `trust_remote_code` is not needed. The loader calls
`register_local_families()` before `AutoConfig.from_pretrained`. Nothing is registered at import time, and only that
call imports transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LOCAL_FAMILIES: dict[str, str] = {
    "deepseek": "smoe.models.deepseek",
    "xverse": "smoe.models.xverse",
}
"""`model_type` -> the module that defines its classes and a `register()` function."""

OPENED_FAMILIES: dict[str, str] = {
    "dbrx": "smoe.models.dbrx",
    "glm5_next_text": "smoe.models.glm5_next",
    "llama4": "smoe.models.llama4",
    "llama4_text": "smoe.models.llama4",
}
"""`model_type` -> the module with our class `MODEL`, for families whose experts transformers does not let other code
compute, and for GLM-5.3-Flash without its image part, of which transformers has no class. If the family's images are
supported, the module also has the class `IMAGE_MODEL` with the image encoder.

These classes are not registered, so that other users of transformers in the process get transformers' own classes.
"""


def register_local_families(model_type: str | None = None) -> None:
    """Register the family `model_type` if it is one of `LOCAL_FAMILIES`; None: register all. Further calls have no
    effect.

    Each family takes a tenth of a second of imports, so only the needed one is registered.
    """
    for name, module in LOCAL_FAMILIES.items():
        if model_type in (None, name):
            importlib.import_module(module).register()


def opened_family(model_type: str, with_images: bool = False) -> type[PreTrainedModel] | None:
    """Return our model class for one of the `OPENED_FAMILIES`, or None for any other family. `with_images`: the class
    that has the image encoder."""
    if model_type not in OPENED_FAMILIES:
        return None
    module = importlib.import_module(OPENED_FAMILIES[model_type])
    found: type[PreTrainedModel] = module.IMAGE_MODEL if with_images else module.MODEL
    return found


def register_family(config_class: type[PreTrainedConfig], model_class: type[PreTrainedModel]) -> None:
    """Register a family whose experts are published as `mlp.experts.E.{gate,up,down}_proj.weight`. Further calls have
    no effect.

    This is the layout of qwen2_moe, whose weight conversion (experts stacked, gate rows before up rows) is reused.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    model_type = config_class.model_type
    AutoConfig.register(model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    register_checkpoint_conversion_mapping(model_type, get_checkpoint_conversion_mapping("qwen2_moe"), overwrite=True)
