"""A configuration without the library: the fields of a config.json, and what the library takes for those that are not
there.

Whatever is not plain (a field of another kind, rotary tables by layer, an unknown quantisation) is left to the
library: `UndescribedError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_ROTARY = {"default": False, "linear": True, "dynamic": True, "yarn": True, "llama3": True, "longrope": False}
"""Kinds of rotary embeddings: whether they need a factor."""
_WITH_ORIGINAL = ("yarn", "llama3", "longrope")
"""Those that were trained at another length first."""
_MAY_LACK = ("pad_token_id", "q_lora_rank", "n_shared_experts", "num_shared_experts")
"""Fields that a config.json may say to be none, where the library has some by default."""
_DTYPES = ("bfloat16", "float16", "float32")


class UndescribedError(Exception):
    """The library has to say what a model is made of: its configuration, or its files, are of no usual kind."""


class PlainConfig:
    """Fields as attributes; those of a text model, as there is no other."""

    def __init__(
        self,
        model_type: str,
        stated: Mapping[str, Any],
        defaults: Mapping[str, Any],
        aliases: Mapping[str, str],
    ) -> None:
        """`stated`: the fields of a config.json; `defaults`: the family's own, for every field that decides a size;
        `aliases`: further names of fields. Raises `UndescribedError`."""
        fields = {aliases.get(key, key): value for key, value in stated.items()}
        for key, usual in defaults.items():
            fields[key] = _checked(key, fields.get(key, usual), usual)
        self._fields: dict[str, Any] = fields | {"model_type": model_type}
        self._aliases = aliases
        self._fields["rope_parameters"] = _rotary(self, defaults.get("rope_parameters"))

    def __getattr__(self, name: str) -> Any:
        if name == "_fields":  # a copy that is being made has none yet
            raise AttributeError(name)
        try:
            return self._fields[self._aliases.get(name, name)]
        except KeyError:
            raise AttributeError(name) from None

    def get(self, name: str, otherwise: Any = None) -> Any:
        """A field that may be missing."""
        return getattr(self, name, otherwise)

    def settle(self, **fields: Any) -> None:
        """Say what follows from other fields."""
        self._fields |= fields

    def get_text_config(self) -> PlainConfig:
        return self

    @property
    def dtype(self) -> str | None:
        """What weights are in, as torch names it."""
        named = self._fields.get("dtype") or self._fields.get("torch_dtype")
        if named is not None and named not in _DTYPES:
            raise UndescribedError(f"dtype {named!r}")
        return named


def _checked(key: str, value: Any, usual: Any) -> Any:
    """A value of the kind that the library takes; raises `UndescribedError` for any other."""
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
    """The rotary embeddings as the library writes them."""
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
