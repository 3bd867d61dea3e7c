"""A model's configuration without transformers: the fields of a config.json, and the family's default values.

Unusual contents raise `UndescribedError`: a field of another type, rotary embeddings that differ by layer, or unknown
quantization. Such configurations are read by transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_ROTARY = {"default": False, "linear": True, "dynamic": True, "yarn": True, "llama3": True, "longrope": False}
"""Types of rotary embeddings, and whether they need a factor."""
_WITH_ORIGINAL = ("yarn", "llama3", "longrope")
"""Types of rotary embeddings whose parameters contain the original context length."""
_MAY_LACK = ("pad_token_id", "q_lora_rank", "n_shared_experts", "num_shared_experts")
"""Fields that may be null although their default is a number."""
_DTYPES = ("bfloat16", "float16", "float32")


class UndescribedError(Exception):
    """Only transformers can describe the model, because its configuration or files are unusual."""


class PlainConfig:
    """The fields of a text model's configuration, as attributes."""

    def __init__(
        self,
        model_type: str,
        stated: Mapping[str, Any],
        defaults: Mapping[str, Any],
        aliases: Mapping[str, str],
        whole: Mapping[str, Any],
    ) -> None:
        """`stated`: the fields of the language model in a config.json. `defaults`: the family's default for every field
        that determines a size. `aliases`: {other name of a field: its name}. `whole`: all fields of the config.json.
        Raise `UndescribedError` if the value of a field has another type than the default."""
        fields = {aliases.get(key, key): value for key, value in stated.items()}
        for key, usual in defaults.items():
            fields[key] = _checked(key, fields.get(key, usual), usual)
        self._fields: dict[str, Any] = fields | {"model_type": model_type}
        self._aliases = aliases
        self.whole = whole
        self._fields["rope_parameters"] = _rotary(self, defaults.get("rope_parameters"))

    def __getattr__(self, name: str) -> Any:
        if name == "_fields":  # an object that is being copied has no fields yet
            raise AttributeError(name)
        try:
            return self._fields[self._aliases.get(name, name)]
        except KeyError:
            raise AttributeError(name) from None

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return a configuration field, or `otherwise` if the field is missing."""
        return getattr(self, name, otherwise)

    def settle(self, **fields: Any) -> None:
        """Set configuration fields whose values follow from other fields."""
        self._fields |= fields

    def get_text_config(self) -> PlainConfig:
        return self

    @property
    def dtype(self) -> str | None:
        """The dtype of the weights, named as in torch; None if there is none."""
        named = self._fields.get("dtype") or self._fields.get("torch_dtype")
        if named is not None and named not in _DTYPES:
            raise UndescribedError(f"dtype {named!r}")
        return named


def _checked(key: str, value: Any, usual: Any) -> Any:
    """Return `value` if it has the type of the default. Raise `UndescribedError` otherwise."""
    if value is None and (usual is None or key in _MAY_LACK):
        return None
    if isinstance(usual, dict) or key == "rope_parameters":
        return value
    if isinstance(usual, (list, tuple)):
        fits = isinstance(value, (list, tuple))
    elif isinstance(usual, (bool, str)):
        fits = type(value) is type(usual)
    else:
        fits = type(value) is int and value >= min(0, usual or 0)
    if not fits:
        raise UndescribedError(f"{key} {value!r:.80}")
    return value


def _rotary(config: PlainConfig, usual: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the rotary embedding parameters in transformers' form."""
    stated = config.get("rope_scaling") or config.get("rope_parameters") or usual or {}
    if not isinstance(stated, dict) or any(isinstance(value, dict) for value in stated.values()):
        raise UndescribedError(f"rope_parameters {stated!r:.80}")
    table = dict(stated)
    kind = table.setdefault("rope_type", table.get("type", "default"))
    if kind not in _ROTARY or (_ROTARY[kind] and not _is_number(table.get("factor"))):
        raise UndescribedError(f"rope_parameters {stated!r:.80}")
    if kind in _WITH_ORIGINAL:
        original = config.get("original_max_position_embeddings")
        if original is not None:
            table["original_max_position_embeddings"] = original
        table.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return table


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
