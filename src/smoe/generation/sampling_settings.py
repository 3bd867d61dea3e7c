"""The settings that decide which tokens are chosen and when a text ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smoe.errors import ConfigError


def check_seed(seed: int) -> None:
    """Raise `ConfigError` if torch's random generators do not accept the seed."""
    if not -(2**63) <= seed < 2**63:
        raise ConfigError.out_of_bounds("seed", seed, "a whole number of 64 bits, such as 1")


@dataclass(frozen=True)
class Sampling:
    """The settings that decide which tokens are chosen and when a text ends. The default is greedy, whatever the
    checkpoint's defaults are. If a setting is None, the checkpoint's generation config decides."""

    max_new_tokens: int = 128
    temperature: float | None = 0.0
    """0: the most probable token is always chosen."""
    top_p: float | None = 1.0
    top_k: int | None = 0
    """The number of most probable tokens of which one is chosen; 0: all tokens."""
    repetition_penalty: float | None = 1.0
    min_p: float | None = None
    """The least probability of a token that may be chosen, as a fraction of the most probable token's; 0: no limit."""
    repetition_window: int | None = None
    """The number of last tokens, of prompt and text, whose repetition is penalised; None: all."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end the text. They are not part of it."""
    ignores_end: bool = False
    """Whether to continue after the model's end token (for measurements)."""
    presence_penalty: float = 0.0
    """A number that is subtracted from the logits of all tokens that have occurred."""
    frequency_penalty: float = 0.0
    """A number that is subtracted from a token's logit for each of its occurrences."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token, number that is added to its logit)."""

    def __post_init__(self) -> None:
        heat, top_p, top_k, penalty = self.temperature, self.top_p, self.top_k, self.repetition_penalty
        min_p, window = self.min_p, self.repetition_window
        for name, holds, allowed in (
            ("max_new_tokens", self.max_new_tokens >= 1, "a whole number of at least 1"),
            ("temperature", heat is None or 0 <= heat < math.inf, "0 (greedy) or more"),
            ("top_p", top_p is None or 0 < top_p <= 1, "above 0 and at most 1"),
            ("top_k", top_k is None or top_k >= 0, "0 (all) or more"),
            ("min_p", min_p is None or 0 <= min_p <= 1, "between 0 (none) and 1"),
            ("repetition_window", window is None or window >= 1, "at least 1 (None: all)"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("repetition_penalty", penalty is None or 0.01 <= penalty <= 100, "between 0.01 and 100 (1: none)"),
        ):
            if not holds:
                raise ConfigError.out_of_bounds(name, getattr(self, name), allowed)
        check_seed(self.seed)
        if not all(self.stop):
            raise ConfigError(
                "`stop` was given an empty string; give the text at which generation ends, or leave out `stop`",
                setting="stop",
                given="",
                allowed="text of at least one character",
            )
