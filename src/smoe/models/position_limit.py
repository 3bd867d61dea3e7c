"""How many positions a model takes, by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smoe.models.spec import ModelConfig

_OF_ALL_POSITIONS = ("linear", "dynamic")
"""Kinds without an original length of their own: the factor multiplies `max_position_embeddings`, which the library's
documentation leaves unchanged for them. Where layers have tables of their own, configurations with linear ones
(Gemma 3's) name the scaled number already."""


def position_limit(config: ModelConfig) -> int | None:
    """The positions that a model takes by its configuration; None where it names none.

    `max_position_embeddings`, or the factor times the original length where that is more: model cards that switch YaRN
    on (Qwen's) leave `max_position_embeddings` as it was.
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
    """Factor times original length; 0 where a table has no such two."""
    factor: Any = table.get("factor")
    kind = table.get("rope_type")
    original = _count(table.get("original_max_position_embeddings"))
    if not original and kind in _OF_ALL_POSITIONS and (is_alone or kind == "dynamic"):
        original = named
    is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool) and isfinite(factor)
    return int(factor * original) if is_number else 0


def _count(value: Any) -> int:
    """A number of positions; 0 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
