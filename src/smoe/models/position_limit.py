"""The largest context length of a model, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smoe.models.spec import ModelConfig

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
