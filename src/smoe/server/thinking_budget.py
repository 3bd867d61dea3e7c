"""A limit on the tokens of reasoning: at the limit the model's own mark ends the reasoning, and the answer follows.

prompt ...<think>  I  see  that  </think>  Yes.
                   1   2    3    forced    chosen freely

If the format has channels, several texts can follow the mark: the header of an answer, and those of calls. One of them
is forced, and the model chooses which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from smoe.generation.detokenizer import overlap
from smoe.server.output.output_format import Marks

_LAST_TOKENS = 24
"""The number of last tokens in whose text a mark is looked for, because some tokenizers write a mark in several
tokens."""
_HALF = "\ufffd"
"""What a tokenizer decodes for a character whose last bytes are missing."""
_LEAST = -1e4
"""The smallest logit of a forced token: finite, so that it can be chosen even if a request forbids it."""
_MOST_HALVES = 3
"""A character has at most four bytes, and so at most this many tokens before its last one."""


class ThinkingBudget:
    """Ends one text's reasoning after a number of tokens: a `Constraint` of the decode loop. If the model begins to
    reason again after that, the reasoning is ended at once."""

    def __init__(
        self, tokenizer: Any, marks: Marks, ways_out: Sequence[str], budget_tokens: int, is_reasoning: bool
    ) -> None:
        """`marks`: the strings before and after reasoning. `ways_out`: the texts that may be forced; each begins with
        the mark after reasoning. `is_reasoning`: whether the prompt ends within reasoning."""
        self._tokenizer, self._marks, self._ways_out = tokenizer, marks, ways_out
        self._budget_tokens, self._is_reasoning = budget_tokens, is_reasoning
        self._mark_length = len(self._tokens_of(marks.end))
        self._forced: list[deque[int]] = []
        """The tokens that are still to come, for each of the texts that can still be completed."""
        self._last = deque[int](maxlen=_LAST_TOKENS)
        self._spent = 0
        self._force_if_spent("")

    def another(self) -> ThinkingBudget:
        """Return the budget of another text with the same prompt; neither has begun."""
        return ThinkingBudget(self._tokenizer, self._marks, self._ways_out, self._budget_tokens, self._is_reasoning)

    def narrow(self, logits: torch.Tensor) -> None:
        """Once the budget is spent, allow only the next tokens of the texts that end reasoning. `logits`: [V]."""
        if self._forced:
            allowed = sorted({way[0] for way in self._forced})
            likely = logits[allowed].clamp(min=_LEAST)
            logits.fill_(-torch.inf)
            logits[allowed] = likely

    def take(self, token: int) -> None:
        """Count the chosen token if it belongs to reasoning."""
        if self._forced:
            self._forced = [way for way in self._forced if way.popleft() == token]
            if any(not way for way in self._forced):
                self._forced, self._is_reasoning = [], False
            return
        self._last.append(token)
        text = self._tokenizer.decode(list(self._last), skip_special_tokens=False)
        if (self._marks.end if self._is_reasoning else self._marks.begin) in text:
            self._is_reasoning = not self._is_reasoning
            self._last.clear()
        elif self._is_reasoning:
            self._spent += 1
            if text.endswith(_HALF) and self._spent < self._budget_tokens + _MOST_HALVES:
                return
        self._force_if_spent(text)

    def _force_if_spent(self, text: str) -> None:
        """Once the budget is spent, require one of the texts that end reasoning. `text`: the last generated text. If
        the mark consists of several tokens, the text may already end with its beginning."""
        if self._is_reasoning and self._spent >= self._budget_tokens:
            begun = overlap(text, self._marks.end) if self._mark_length > 1 else 0
            self._forced = [deque(self._tokens_of(way[begun:])) for way in self._ways_out]
            self._last.clear()

    def _tokens_of(self, text: str) -> Sequence[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens
