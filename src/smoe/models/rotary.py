"""Finds rotary embeddings whose frequencies depend on the length of the text.

transformers has two such types. `longrope` has one set of factors up to the original length and another for longer
texts. `dynamic` has other factors for every length above `max_position_embeddings`. Keys that were computed with
different factors must not be used together. A length at which the factors change is called a *switch*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

Factors = tuple[int, int]
"""The factors that a length selects: (the number of switches below it, the length itself if every length has its own
factors, else 0)."""


@dataclass(frozen=True)
class LengthRule:
    """The rule by which the length of a text determines its rotary factors."""

    switches: frozenset[int] = frozenset()
    """The largest length of each set of factors except the last."""
    grows_beyond: int | None = None
    """The length above which every length has factors of its own."""

    def __bool__(self) -> bool:
        """Return whether the rotary factors depend on the length of the text at all."""
        return bool(self.switches) or self.grows_beyond is not None

    def factors(self, length: int) -> Factors:
        """Return a value that identifies the rotary factors of a text of this length. It is equal for two lengths that
        have the same factors."""
        own = length if self.grows_beyond is not None and length > self.grows_beyond else 0
        return sum(length > switch for switch in self.switches), own

    def __or__(self, other: LengthRule) -> LengthRule:
        beyond = [rule.grows_beyond for rule in (self, other) if rule.grows_beyond is not None]
        return LengthRule(self.switches | other.switches, min(beyond, default=None))


def rotary_modules(model: nn.Module) -> Iterator[tuple[nn.Module, LengthRule]]:
    """Yield the rotary embeddings that depend on the length of a text, with their rules."""
    for module in model.modules():
        if hasattr(module, "rope_type") and isinstance(getattr(module, "config", None), PretrainedConfig):
            rule = _rule_of(module)
            if rule:
                yield module, rule


def length_rule(model: nn.Module) -> LengthRule:
    """Return one rule for all rotary embeddings of a model. It changes the factors at every length at which one of them
    changes."""
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
    """Return whether transformers' `generate` drops the KV cache and recomputes a text that grows past a length at
    which its rotary factors change (a switch).

    To find out, the model's class is called with an empty cache and a text that is one token longer than the largest
    switch.
    """
    if not rule.switches:
        return False
    ids = torch.zeros(1, max(rule.switches) + 1, dtype=torch.long, device=model.device)
    cache = DynamicCache(config=model.config)
    inputs = model.prepare_inputs_for_generation(  # type: ignore[operator]
        ids, past_key_values=cache, attention_mask=torch.ones_like(ids), use_cache=True
    )
    return inputs.get("past_key_values") is None
