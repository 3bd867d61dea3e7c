"""A model that writes given texts, one token at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from smoe.server import talk
from smoe.server.grammar import Grammar

TEMPLATE = (
    "{% if tools %}tools <tool_call>: {{ tools | tojson }} {% endif %}{% for m in messages %}{{ m['role'] }}: "
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}[{{ c['function']['name'] }} "
    "{{ c['function']['arguments'] | tojson }}]{% endfor %}"
    "{% if not loop.last or m['role'] != 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}{% endif %}"
)
CALL = '<tool_call>{"name": "warmth", "arguments": {"city": "Oslo"}}</tool_call>'
RESULT = "3 degrees"


def answer_to(prompt: str) -> str:
    """What the model writes: a call, then what its result says; without tools a greeting."""
    if RESULT in prompt:
        return "It is cold."
    begun = "I see.</think>" if prompt.endswith("<think>") else ""
    return begun + (f"Wait.{CALL}" if prompt.startswith("tools") else "Hello there, you.")


class Scripted:
    """A constraint that leaves one token to choose from, until a text is complete."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = deque(tokens)

    def narrow(self, logits: torch.Tensor) -> None:
        if self._left:
            logits.fill_(-torch.inf)
            logits[self._left[0]] = 0.0

    def take(self, token: int) -> None:
        if self._left:
            assert self._left.popleft() == token

    def another(self) -> Scripted:
        return Scripted(self._left)


def scripted(patch: pytest.MonkeyPatch, tokenizer: Any, answer: Callable[[str], str]) -> None:
    """Have `answer` decide what the model writes after each prompt of a conversation. Grammars still decide what they
    are for."""
    texts_of, end = talk.texts_of, tokenizer.eos_token_id

    def asked(
        ids: Sequence[int], sampling: Any, count: int, logprobs: int | None, constraint: Any, *images: Any
    ) -> Any:
        if not isinstance(constraint, (Grammar, Scripted)):
            text = answer(tokenizer.decode(ids, skip_special_tokens=False))
            constraint = Scripted([*tokenizer.encode(text, add_special_tokens=False), end])
        return texts_of(ids, sampling, count, logprobs, constraint, *images)

    patch.setattr(talk, "texts_of", asked)
