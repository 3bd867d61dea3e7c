"""From what the user asks for to the rate at which a layer trades quality for time: seconds per nat.

Asked for is a bound on quality (so many nats a token, `QualityBudget`) or on time (so many seconds a token,
`TimeBudget`). Either way the best plan is that of one rate for all layers and steps, as nats and seconds add up: the
rate at which what is spent, on average, is what may be spent. It is unknown beforehand, so it is adapted:

    more was spent than may be -> the rate is multiplied up, nats become dearer
    something was spared       -> the rate is multiplied down

by much at first, by little later, so that it settles. A bound on quality is a promise besides: spent nats come from a
bucket into which every token pours its share, and which holds little more than the shares of `BURST_TOKENS`.

    spent so far <= (tokens so far + BURST_TOKENS) * nats a token, always

Pure: both get what was spent, and have no clock.
"""

from __future__ import annotations

from math import exp, inf, isfinite, log, log1p

from smoe.errors import ConfigError

BURST_TOKENS = 8
"""Tokens whose nats may be saved up."""
LEAST_GAIN = 0.005
"""The amount by which an error of 1 in one token moves the logarithm of a settled rate; noise of 30 % from token to
token then moves the rate by some 2 %."""
FIRST_GAINS, SETTLED_AFTER = 4.0, 8
"""Before that the gain is FIRST_GAINS / (SETTLED_AFTER + tokens). What is spent falls about as the rate to the power of
-0.4; with half these gains a rate begun 20 times too high is still 8 % off after 600 tokens."""
MOST_GAIN = 0.25
"""The largest change in one step, however many tokens it has."""
MOST_ERROR = 3.0
RANGE = 1e4
"""The rate stays within this factor of the one it began with; where it is that high, it is infinite: exact."""
RECENT = 0.05
"""Weight of the last step in a decaying mean."""
LEAST_WAITED = 1e-3
"""Part of a token's time that is taken to be waited for at least."""


def nats_of_perplexity(max_perplexity_increase: float) -> float:
    """Nats a token by which the cross-entropy may rise for the perplexity to rise by that part (0.01: one percent).

    Raises `ConfigError` unless it is a number from 0 to 1.
    """
    if not 0.0 <= max_perplexity_increase <= 1.0:  # false for NaN
        raise ConfigError.out_of_bounds("max_perplexity_increase", max_perplexity_increase, "from 0 to 1 (0.01 is 1 %)")
    return log1p(max_perplexity_increase)


class _Rate:
    """A rate that is multiplied up or down, by less and less."""

    def __init__(self, first: float) -> None:
        if not (first > 0.0 and isfinite(first)):
            raise ConfigError.out_of_bounds("rate", first, "seconds per nat, above 0 and finite")
        self._first = self._log = log(first)
        self._tokens = 0

    @property
    def seconds_per_nat(self) -> float:
        return inf if self._log >= self._first + log(RANGE) else exp(self._log)

    def move(self, error: float, tokens: int) -> None:
        """`error`: above 0 nats are to become dearer, 1 is as much too much again as was allowed."""
        self._tokens += tokens
        gain = max(LEAST_GAIN, FIRST_GAINS / (SETTLED_AFTER + self._tokens))
        moved = self._log + min(MOST_GAIN, gain * tokens) * max(-MOST_ERROR, min(MOST_ERROR, error))
        self._log = max(self._first - log(RANGE), min(self._first + log(RANGE), moved))


class QualityBudget:
    """So many nats a token, never more than that and a small burst.

    Each step: `begin_step`, then for every layer `choose(..., rate, limit=limit)` and `spend`.
    """

    def __init__(self, nats_per_token: float, first_rate: float) -> None:
        """`first_rate` is best the one that was tuned. Raises `ConfigError` for nats below 0 or without an end, and for
        a rate that is not above 0."""
        if not (nats_per_token >= 0.0 and isfinite(nats_per_token)):
            raise ConfigError.out_of_bounds("nats_per_token", nats_per_token, "0 or more, and finite")
        self.nats_per_token = nats_per_token
        self.limit = BURST_TOKENS * nats_per_token
        """Nats that may be spent now."""
        self._rate = _Rate(first_rate)
        self._tokens = 0
        self._wanted = 0.0

    @property
    def rate(self) -> float:
        """Seconds per nat; infinite where nothing may be spent."""
        return self._rate.seconds_per_nat if self.nats_per_token else inf

    def begin_step(self, tokens: int) -> None:
        """Draw the lesson of the step before, and let the step's tokens pour their nats in."""
        if self._tokens and self.nats_per_token:
            self._rate.move(self._wanted / (self._tokens * self.nats_per_token) - 1.0, self._tokens)
        self._tokens, self._wanted = tokens, 0.0
        self.limit = min(self.limit, BURST_TOKENS * self.nats_per_token) + tokens * self.nats_per_token

    def spend(self, nats: float, wanted_nats: float) -> None:
        """A layer spent so many nats, and would have spent so many at this rate without the limit.

        The rate follows what was wanted: with the limit in force, what is spent looks right at any rate.
        """
        assert nats <= self.limit, (nats, self.limit)
        self.limit -= nats
        self._wanted += wanted_nats


class TimeBudget:
    """So many seconds a token on average: the highest rate, and so the best quality, that meets them."""

    def __init__(self, seconds_per_token: float, first_rate: float) -> None:
        """Raises `ConfigError` unless both are above 0 and finite."""
        if not (seconds_per_token > 0.0 and isfinite(seconds_per_token)):
            raise ConfigError.out_of_bounds("tpot", seconds_per_token, "seconds per token, above 0 and finite")
        self.seconds_per_token = seconds_per_token
        self._rate = _Rate(first_rate)
        self._waited: float | None = None

    @property
    def rate(self) -> float:
        """Seconds per nat; infinite where exact answers meet the time."""
        return self._rate.seconds_per_nat

    def note(self, seconds: float, waited_seconds: float) -> None:
        """A step took so long, of which its layers, as predicted, waited for missing experts.

        Only what is waited for depends on the rate, so an error is measured by its decaying mean. Each sequence of a
        batch gets a token from the step: the step's seconds are a token's, however many there are.
        """
        before = waited_seconds if self._waited is None else self._waited
        self._waited = before + RECENT * (waited_seconds - before)
        scale = max(self._waited, LEAST_WAITED * self.seconds_per_token)
        self._rate.move((self.seconds_per_token - seconds) / scale, 1)
