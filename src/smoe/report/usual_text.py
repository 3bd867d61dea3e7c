"""The lengths of the text for which `smoe plan` states times: the prompt and the answer."""

from __future__ import annotations

from smoe.policy.budget import Ledger

PROMPT_TOKENS = 128
"""The number of prompt tokens for which the time to the first token (TTFT) is stated: the longer prompt of the
papers."""
ANSWER_WORDS = 200
"""The number of words of an answer whose time is stated."""
TOKENS_A_WORD = 4 / 3
"""The mean number of tokens of an English word."""


def usual_slots(ledger: Ledger) -> int:
    """Return the number of experts that fit in memory at the end of a usual answer."""
    return ledger.slots_of_text(PROMPT_TOKENS + round(ANSWER_WORDS * TOKENS_A_WORD))
