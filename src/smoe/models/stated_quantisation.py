"""Where a release states how it is quantised: `quantization_config` of config.json, the same inside the configuration
of the text model, or, of NVIDIA's modelopt, a file of its own.

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
"""Under which names the configuration of a language model lies in that of a model for more than text."""


class Stated(NamedTuple):
    """What a release states of its quantised matrices."""

    fields: Mapping[str, Any]
    place: Path
    """The file that states it."""
    is_of_text: bool = False
    """It is stated of the language model alone: what sees images is in full."""

    @property
    def method(self) -> object:
        return self.fields.get("quant_method")


def stated_quantisation(config_place: Path) -> Stated | None:
    """What a config.json and the files next to it state; None: nothing is quantised."""
    found = stated_in(read_object(config_place), config_place)
    sidecar = _of_modelopt(config_place.with_name(MODELOPT_FILE))
    if sidecar is not None and (found is None or found.method == "modelopt"):
        fields = sidecar.fields if found is None else {**sidecar.fields, **found.fields}
        found = (found or sidecar)._replace(fields=fields)
    return None if found is None or _states_nothing(found.fields) else found


def stated_in(config: Mapping[str, Any], place: Path) -> Stated | None:
    """What a configuration itself states."""
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
        raise CheckpointError(f"{place}: 'quantization' is {fields!r:.80}, it must be an object; download it again")
    return Stated({"quant_method": "modelopt", **fields}, place)


def _states_nothing(fields: Mapping[str, Any]) -> bool:
    """Whether modelopt states nothing: keys and values may be all that it quantises."""
    return fields.get("quant_method") == "modelopt" and "quant_algo" in fields and fields["quant_algo"] is None
