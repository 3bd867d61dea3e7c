"""What a model's rotary embeddings say about lengths: how many positions the model takes, and where the turning of a
position depends on how long its text is.

Most kinds turn a position by the position alone. Two kinds of the library do not: `longrope` has one set of factors up
to the original length and another one beyond it; `dynamic` has other factors for every length beyond
`max_position_embeddings`. Keys that were made with one set of factors are wrong together with those of another set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

Factors = tuple[int, int]
"""What a length chooses: (how many switches the length exceeds, the length itself where it counts, else 0)."""

_OF_ALL_POSITIONS = ("linear", "dynamic")
"""Kinds without an original length of their own: the factor multiplies `max_position_embeddings`, which the library's
documentation leaves unchanged for them. Where layers have tables of their own, configurations with linear ones
(Gemma 3's) name the scaled number already."""


def position_limit(config: PretrainedConfig) -> int | None:
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


@dataclass(frozen=True)
class LengthRule:
    """Which factors a text of some length has."""

    switches: frozenset[int] = frozenset()
    """Lengths that are the last ones of their factors."""
    grows_beyond: int | None = None
    """Every length above this one has factors of its own."""

    def __bool__(self) -> bool:
        """Whether the length decides at all."""
        return bool(self.switches) or self.grows_beyond is not None

    def factors(self, length: int) -> Factors:
        """Equal for two lengths whose positions are turned alike."""
        own = length if self.grows_beyond is not None and length > self.grows_beyond else 0
        return sum(length > switch for switch in self.switches), own

    def __or__(self, other: LengthRule) -> LengthRule:
        beyond = [rule.grows_beyond for rule in (self, other) if rule.grows_beyond is not None]
        return LengthRule(self.switches | other.switches, min(beyond, default=None))


def rotary_modules(model: nn.Module) -> Iterator[tuple[nn.Module, LengthRule]]:
    """The rotary embeddings that depend on the length of a text, each with its rule."""
    for module in model.modules():
        if hasattr(module, "rope_type") and isinstance(getattr(module, "config", None), PretrainedConfig):
            rule = _rule_of(module)
            if rule:
                yield module, rule


def length_rule(model: nn.Module) -> LengthRule:
    """Of all rotary embeddings of a model together."""
    whole = LengthRule()
    for _, rule in rotary_modules(model):
        whole |= rule
    return whole


def _rule_of(module: nn.Module) -> LengthRule:
    config: Any = module.config
    kinds: Any = module.rope_type
    tables = config.rope_parameters or {}
    whole = LengthRule()
    for name, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        table = tables if name is None else tables.get(name) or {}
        if kind == "dynamic":
            whole |= LengthRule(grows_beyond=config.max_position_embeddings)
        elif kind == "longrope" or (kind != "default" and "long_mscale" in table):
            whole |= LengthRule(switches=frozenset({table["original_max_position_embeddings"]}))
    return whole


def reads_again(model: PreTrainedModel, rule: LengthRule) -> bool:
    """Whether the library's `generate` drops the cache of a text that grows past a switch, and so reads it again: asked
    of the model's class, with an empty cache and a text of one token more."""
    if not rule.switches:
        return False
    ids = torch.zeros(1, max(rule.switches) + 1, dtype=torch.long, device=model.device)
    cache = DynamicCache(config=model.config)
    inputs = model.prepare_inputs_for_generation(  # type: ignore[operator]
        ids, past_key_values=cache, attention_mask=torch.ones_like(ids), use_cache=True
    )
    return inputs.get("past_key_values") is None
