"""What a model's rotary embeddings say about lengths: where the turning of a position depends on how long its text is.

Most kinds turn a position by the position alone. Two kinds of the library do not: `longrope` has one set of factors up
to the original length and another one beyond it; `dynamic` has other factors for every length beyond
`max_position_embeddings`. Keys that were made with one set of factors are wrong together with those of another set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

Factors = tuple[int, int]
"""What a length chooses: (how many switches the length exceeds, the length itself where it counts, else 0)."""


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
    """The rule of all rotary embeddings of a model."""
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
