"""Makes rotary embeddings whose frequencies depend on the length of the text use the length of each row's own text.

transformers has two such types. `longrope` has one set of factors up to the original length and another for longer
texts. `dynamic` has other factors for every length above `max_position_embeddings`. Keys that were computed with
different factors must not be used together. A length at which the factors change is called a *switch*.

transformers uses the largest position of a pass for all its rows. This is wrong for a piece of a longer prompt, and for
rows of different lengths. Also, `dynamic` factors remain those of the longest text so far. Here each row gets the
factors that a newly loaded model computes for its whole text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
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


class RotaryLengths:
    """The length rule of one model, and the text lengths of the pass that is running."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Replace the forward function of the model's length-dependent rotary embeddings."""
        self.rule = length_rule(model)
        self.reads_again = reads_again(model, self.rule)
        """Whether a text that grows past a switch is recomputed, as transformers does for this family. Otherwise only
        the tokens after the switch get the other factors, also as in transformers."""
        self._whole: Sequence[int] = ()
        for module, rule in rotary_modules(model):
            module.forward = _ByRow(module.forward, rule, self)  # type: ignore[method-assign,assignment]

    def is_switch(self, length: int) -> bool:
        """Return whether a text of this length must be recomputed before its next token."""
        return self.reads_again and self.rule.factors(length)[0] != self.rule.factors(length + 1)[0]

    @contextmanager
    def reading(self, whole: Sequence[int]) -> Iterator[None]:
        """During the `with` block, passes read pieces of prompts. `whole`: the final length of each row's prompt, which
        determines its rotary factors."""
        before, self._whole = self._whole, whole
        try:
            yield
        finally:
            self._whole = before

    def of_rows(self, lengths: Sequence[int]) -> list[int]:
        """Return for each row the text length that determines its rotary factors. `lengths`: the lengths of the rows'
        texts after the pass."""
        whole, rows = self._whole, len(lengths)
        if not whole:
            return list(lengths)
        copies, rest = divmod(rows, len(whole))
        if rest or not copies:  # one row of positions for all texts
            return [max(length, *whole) for length in lengths]
        return [max(length, whole[row // copies]) for row, length in enumerate(lengths)]


class _ByRow:
    """The forward function of one rotary embedding. It takes positions [..., rows, tokens], and returns cosines and
    sines [..., rows, tokens, D]."""

    def __init__(self, library: Callable[..., Any], rule: LengthRule, lengths: RotaryLengths) -> None:
        self._library, self._rule, self._lengths = library, rule, lengths
        self._last: dict[Any, int] = {}
        """The largest length for which transformers' factors have grown, by the other arguments of the call."""

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = position_ids.shape[-2]
        own = (position_ids.movedim(-2, 0).reshape(rows, -1).amax(dim=1) + 1).tolist()
        wanted = self._lengths.of_rows(own)
        factors = [self._rule.factors(length) for length in wanted]
        if len({*factors, self._rule.factors(max(own))}) == 1:
            return self._ask(x, position_ids, factors[0], args, kwargs)
        found = []
        for row, length in enumerate(wanted):
            longer = functional.pad(position_ids[..., row : row + 1, :], (0, 1), value=length - 1)
            found.append(_map(_without_last, self._ask(x, longer, factors[row], args, kwargs)))
        return _map(lambda *parts: torch.cat(parts, dim=-3), *found)

    def _ask(
        self, x: torch.Tensor, position_ids: torch.Tensor, factors: Factors, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return the result of transformers' rotary embedding, computed with the given factors.

        If transformers' factors have grown for a longer text, a call with position 0 resets them first.
        """
        of, length = (args, tuple(kwargs.items())), factors[1]
        if self._last.get(of, 0) >= max(length, 1):
            self._library(x, torch.zeros_like(position_ids[..., :1, :1]), *args, **kwargs)
        self._last[of] = length
        return self._library(x, position_ids, *args, **kwargs)


def _without_last(turned: torch.Tensor) -> torch.Tensor:
    return turned[..., :-1, :]


def _map(change: Callable[..., torch.Tensor], *found: Any) -> Any:
    """Return the result of a function that is applied to a tensor, or to the corresponding tensors of several
    tuples."""
    if isinstance(found[0], tuple):
        return tuple(change(*parts) for parts in zip(*found, strict=True))
    return change(*found)
