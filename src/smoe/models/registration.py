"""Families that transformers does not have, made known to its Auto classes, and those whose experts it does not open.

transformers looks a checkpoint's `model_type` up in its own tables first; a class registered there from outside the
library wins over the checkpoint's `auto_map`, so no remote code is run and `trust_remote_code` is not needed. The
loader calls `register_local_families()` before `AutoConfig.from_pretrained`; nothing is registered at import time,
and transformers itself is imported only by that call.
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
"""`model_type` -> the module that holds its classes and a `register()` function."""

OPENED_FAMILIES: dict[str, str] = {
    "dbrx": "smoe.models.dbrx",
    "llama4": "smoe.models.llama4",
    "llama4_text": "smoe.models.llama4",
}
"""`model_type` -> the module with our `MODEL` of it: families that the library has, with experts that it alone can use.
They are not registered, so that programs that use the library as well get its own."""


def register_local_families(model_type: str | None = None) -> None:
    """Register the family `model_type`, where it is one of `LOCAL_FAMILIES`; None: all of them.

    Calling it again changes nothing. Each costs a tenth of a second of imports, so only what is needed is registered.
    """
    for name, module in LOCAL_FAMILIES.items():
        if model_type in (None, name):
            importlib.import_module(module).register()


def opened_family(model_type: str) -> type[PreTrainedModel] | None:
    """Our model of one of the `OPENED_FAMILIES`, made from a configuration as by an Auto class; None for any other."""
    if model_type not in OPENED_FAMILIES:
        return None
    found: type[PreTrainedModel] = importlib.import_module(OPENED_FAMILIES[model_type]).MODEL
    return found


def register_family(config_class: type[PreTrainedConfig], model_class: type[PreTrainedModel]) -> None:
    """Register one family whose experts are published as `mlp.experts.E.{gate,up,down}_proj.weight`. Idempotent.

    That is the layout of qwen2_moe, whose conversion (experts stacked, gate rows before up rows) is taken over.
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
