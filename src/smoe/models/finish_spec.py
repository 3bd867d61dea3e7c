"""Completes a model's spec, once its outline is known, with the engine's configuration and the sizes in its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from smoe.config import EngineConfig
from smoe.errors import CheckpointError, ConfigError
from smoe.expert import LOW
from smoe.memory.dtypes import BY_NAME, Dtype
from smoe.models.described import Described
from smoe.models.outline import Outline
from smoe.models.spec import ModelConfig, ModelSpec, own_dtype
from smoe.units import format_bytes

if TYPE_CHECKING:
    from smoe.models.spec import ModelConfig


DEFAULT_CONTEXT_TOKENS = 4096
_Spec = TypeVar("_Spec", bound=ModelSpec)


def finished(spec: _Spec, checkpoint: Described, config: EngineConfig) -> _Spec:
    """Return the spec completed with its quantized weights and file sizes. These come from the files, or from the
    configuration if there are no files."""
    _check_used(spec.outline, checkpoint.config_place)
    dense = checkpoint.quantised_dense(spec) if config.dense_precision == "as-stored" else {}
    spec = with_experts_of(replace(spec, dense=dense), checkpoint, config)
    spec = replace(spec, files=checkpoint.file_bytes(spec))
    return replace(spec, doubts=checkpoint.doubts(spec))


def with_experts_of(spec: _Spec, checkpoint: Described, config: EngineConfig) -> _Spec:
    """Return the spec with the experts, and their low-precision copies, in the configured precisions.

    Raises `ConfigError` if the files do not allow a precision.
    """
    spec = replace(spec, precision=config.precision, low=None)
    spec = replace(spec, stored_bytes=checkpoint.quantised_bytes(spec))
    return replace(spec, low=_low_copies(spec, checkpoint, config)) if config.has_low else spec


def _low_copies(spec: _Spec, checkpoint: Described, config: EngineConfig) -> _Spec:
    """Return the spec of the experts' low-precision copies. Raise `ConfigError` if the copies would not be smaller than
    the experts."""
    low = replace(spec, precision=config.low_precision, form=LOW)
    low = replace(low, stored_bytes=checkpoint.quantised_bytes(low))
    if low.expert_bytes >= spec.expert_bytes:
        raise ConfigError(
            f"`low_precision={config.low_precision}` saves no memory: a low-precision copy of an expert would take "
            f"{format_bytes(low.expert_bytes)}, and an expert as it is stored takes "
            f"{format_bytes(spec.expert_bytes)}; give a lower precision, or none",
            setting="low_precision",
            given=config.low_precision,
            allowed="a precision of fewer bits than the experts have",
        )
    return low


def choose_dtype(model_config: ModelConfig, config: EngineConfig) -> Dtype:
    """Return the dtype that the engine's configuration names; for `auto`, the checkpoint's own."""
    if config.dtype != "auto":
        return BY_NAME[config.dtype]  # a valid name: the configuration has been checked
    return own_dtype(model_config)


def choose_context(model_config: ModelConfig, config: EngineConfig) -> int:
    """Return the configured number of context tokens. If there is none, return `DEFAULT_CONTEXT_TOKENS`, or the model's
    limit if that is lower. Raise `ConfigError` if the configured number exceeds the model's limit."""
    limit = position_limit(model_config)
    if config.context_tokens is None:
        return min(DEFAULT_CONTEXT_TOKENS, limit or DEFAULT_CONTEXT_TOKENS)
    if limit is not None and config.context_tokens > limit:
        raise ConfigError(
            f"`context_tokens={config.context_tokens}` is more than the {limit} positions that config.json allows "
            f"for this model; give at most {limit}",
            setting="context_tokens",
            given=config.context_tokens,
            allowed=f"a whole number from 1 to {limit}",
        )
    return config.context_tokens


def _check_used(outline: Outline, path: Path) -> None:
    """Raise `CheckpointError` if a layer's top-k is missing, is zero, or exceeds its number of experts."""
    for site in outline.sites:
        top_k = outline.anatomy.top_k.get(site.layer)
        if top_k is None or not 1 <= top_k <= site.experts:
            raise CheckpointError(
                f"according to {path}, a token uses {top_k} experts of layer {site.layer}, which has only "
                f"{site.experts}; download the file again"
            )


_OF_ALL_POSITIONS = ("linear", "dynamic")
"""Rotary types without an original length, whose factor multiplies `max_position_embeddings`.

transformers' documentation leaves that field unscaled for them. Configurations with rotary parameters by layer (Gemma
3) contain the scaled number for linear ones.
"""


def position_limit(config: ModelConfig) -> int | None:
    """Return the largest context length of a model in tokens, or None if the configuration has none.

    The length is `max_position_embeddings`, or the rotary scaling's factor times its original length if the product is
    larger. (Qwen's instructions to enable YaRN leave `max_position_embeddings` unchanged.)
    """
    text = config.get_text_config()
    named = _count(getattr(text, "max_position_embeddings", None))
    if not named:
        return None
    tables = getattr(text, "rope_parameters", None)
    tables = tables if isinstance(tables, dict) else {}
    nested = [table for table in tables.values() if isinstance(table, dict)]
    reached = [_scaled(table, named, is_alone=not nested) for table in nested or [tables]]
    return max(named, *reached)


def _scaled(table: Mapping[str, Any], named: int, is_alone: bool) -> int:
    """Return the context length of scaled rotary embeddings: factor times original length, or 0 if either is
    missing."""
    factor: Any = table.get("factor")
    kind = table.get("rope_type")
    original = _count(table.get("original_max_position_embeddings"))
    if not original and kind in _OF_ALL_POSITIONS and (is_alone or kind == "dynamic"):
        original = named
    is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool) and isfinite(factor)
    return int(factor * original) if is_number else 0


def _count(value: Any) -> int:
    """Return `value` if it is a positive integer, and 0 for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
