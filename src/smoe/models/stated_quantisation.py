"""Finds a checkpoint's quantization settings: in config.json, in a nested text configuration, or in a file of modelopt.

config.json            {"quantization_config": {"quant_method": "fp8", ...}}
config.json            {"text_config": {"quantization_config": ...}}                        (Kimi K2.5)
hf_quant_config.json   {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from smoe.errors import CheckpointError
from smoe.memory.checkpoint_json import read_object

MODELOPT_FILE = "hf_quant_config.json"
_KEYS = ("quantization_config", "compression_config")
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Names of the language model's configuration within that of a multimodal model."""


class Stated(NamedTuple):
    """The quantization settings of a checkpoint."""

    fields: Mapping[str, Any]
    place: Path
    """The file that contains the settings."""
    is_of_text: bool = False
    """Whether the settings apply to the language model only, so that an image encoder is unquantized."""

    @property
    def method(self) -> object:
        return self.fields.get("quant_method")


def stated_quantisation(config_place: Path) -> Stated | None:
    """Return the quantization settings in a config.json and the files next to it, or None if nothing is quantized."""
    found = stated_in(read_object(config_place), config_place)
    sidecar = _of_modelopt(config_place.with_name(MODELOPT_FILE))
    if sidecar is not None and (found is None or found.method == "modelopt"):
        fields = sidecar.fields if found is None else {**sidecar.fields, **found.fields}
        found = (found or sidecar)._replace(fields=fields)
    return None if found is None or _states_nothing(found.fields) else found


def stated_in(config: Mapping[str, Any], place: Path) -> Stated | None:
    """Return the quantization settings in a configuration itself, or None if there are none."""
    texts = [config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), dict)]
    for each_config in (config, *texts):
        fields = next(
            (each_config[key] for key in _KEYS if isinstance(each_config.get(key), dict) and each_config[key]), None
        )
        if fields is not None:
            experts = next(
                (each["expert_dtype"] for each in (fields, each_config, config) if each.get("expert_dtype")), None
            )
            more = {} if experts is None else {"expert_dtype": experts}
            return Stated({**fields, **more}, place, each_config is not config)
    return None


def _of_modelopt(place: Path) -> Stated | None:
    if not place.exists():
        return None
    fields = read_object(place).get("quantization")
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"the field 'quantization' of {place} is {fields!r:.80}; it must be an object: download the file again"
        )
    return Stated({"quant_method": "modelopt", **fields}, place)


def _states_nothing(fields: Mapping[str, Any]) -> bool:
    """Return whether modelopt's settings leave all weights unquantized; they may quantize only the KV cache."""
    return fields.get("quant_method") == "modelopt" and "quant_algo" in fields and fields["quant_algo"] is None
