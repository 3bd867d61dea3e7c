"""Rotary embeddings whose factors depend on the length of a text, asked for every row's own length.

The library takes the largest position of a pass for the length of all its rows. That is wrong for a piece of a longer
prompt and for rows of other lengths, and `dynamic` factors stay those of the longest text so far. Here every row has
the factors that the library, just loaded, gives to its text alone and whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from smoe.models.rotary import Factors, LengthRule, length_rule, reads_again, rotary_modules


class RotaryLengths:
    """The state of one model: the rule by which it turns positions, and how long the texts of the pass under way will
    be."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Replaces the forward of the model's rotary embeddings, where the length decides."""
        self.rule = length_rule(model)
        self.reads_again = reads_again(model, self.rule)
        """Whether a text that grows past a switch is read again, as the library does for this family; else only what
        comes after the switch has the other factors, as in the library."""
        self._whole: Sequence[int] = ()
        for module, rule in rotary_modules(model):
            module.forward = _ByRow(module.forward, rule, self)  # type: ignore[method-assign,assignment]

    def is_switch(self, length: int) -> bool:
        """Whether a text of this length has to be read again for another token."""
        return self.reads_again and self.rule.factors(length)[0] != self.rule.factors(length + 1)[0]

    @contextmanager
    def reading(self, whole: Sequence[int]) -> Iterator[None]:
        """Inside, passes are pieces of texts of these lengths, one of each row; a text longer than that has its own."""
        before, self._whole = self._whole, whole
        try:
            yield
        finally:
            self._whole = before

    def of_rows(self, lengths: Sequence[int]) -> list[int]:
        """The lengths that decide for rows that have `lengths` tokens after the pass."""
        whole, rows = self._whole, len(lengths)
        if not whole:
            return list(lengths)
        copies, rest = divmod(rows, len(whole))
        if rest or not copies:  # one row of positions for all texts
            return [max(length, *whole) for length in lengths]
        return [max(length, whole[row // copies]) for row, length in enumerate(lengths)]


class _ByRow:
    """The forward of one rotary embedding. Positions [..., rows, tokens] -> the library's [..., rows, tokens, D]."""

    def __init__(self, library: Callable[..., Any], rule: LengthRule, lengths: RotaryLengths) -> None:
        self._library, self._rule, self._lengths = library, rule, lengths
        self._last: dict[Any, int] = {}
        """Beyond which length the library's own factors have grown, by what else it was given."""

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
        """The library's answer, by factors that have not grown for a longer text before: a position of 0 takes the
        library back to the factors that it was loaded with."""
        of, length = (args, tuple(kwargs.items())), factors[1]
        if self._last.get(of, 0) >= max(length, 1):
            self._library(x, torch.zeros_like(position_ids[..., :1, :1]), *args, **kwargs)
        self._last[of] = length
        return self._library(x, position_ids, *args, **kwargs)


def _without_last(turned: torch.Tensor) -> torch.Tensor:
    return turned[..., :-1, :]


def _map(change: Callable[..., torch.Tensor], *found: Any) -> Any:
    """Apply to tensors, or to the tensors at every place of tuples."""
    if isinstance(found[0], tuple):
        return tuple(change(*parts) for parts in zip(*found, strict=True))
    return change(*found)
