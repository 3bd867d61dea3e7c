"""Adapts the rate at which layers trade quality for time (seconds per nat) to the user's target.

The target is a bound on quality (nats per token, `QualityBudget`) or on time (seconds per token, `TimeBudget`). In both
cases the best plan has one rate for all layers and steps, because nats and seconds add up: the rate at which the
average spending equals the target. It is unknown at first, so it is adapted:

    spending above the target -> the rate is multiplied up, nats become dearer
    spending below the target -> the rate is multiplied down

by much at first, by little later, so that it settles. A bound on quality is also a guarantee: nats are taken from a
bucket that every token fills by its share, and that holds little more than the shares of `BURST_TOKENS`.

    spent so far <= (tokens so far + BURST_TOKENS) * nats per token, always

The functions are pure: spending is an argument, and there is no clock.
"""

from __future__ import annotations

from math import exp, inf, isfinite, log, log1p

from smoe.errors import ConfigError

BURST_TOKENS = 8
"""The number of tokens whose nats may be saved up."""
LEAST_GAIN = 0.005
"""The change of the logarithm of a settled rate for an error of 1 in one token; noise of 30 % from token to token then
changes the rate by some 2 %."""
FIRST_GAINS, SETTLED_AFTER = 4.0, 8
"""Before it settles, the gain is FIRST_GAINS / (SETTLED_AFTER + tokens). Spending falls about as the rate to the power
of -0.4; with half these gains, a rate that starts 20 times too high is still 8 % off after 600 tokens."""
MOST_GAIN = 0.25
"""The largest change in one step, however many tokens it has."""
MOST_ERROR = 3.0
RANGE = 1e4
"""The rate stays within this factor of its first value; at the upper end it becomes infinite: exact."""
RECENT = 0.05
"""The weight of the last step in a decaying mean."""
LEAST_WAITED = 1e-3
"""The least share of a token's time that is assumed to be waiting."""


def nats_of_perplexity(max_perplexity_increase: float) -> float:
    """Return the nats per token by which the cross-entropy may rise if the perplexity may rise by this part (0.01: one
    percent).

    Raises `ConfigError` unless it is a number from 0 to 1.
    """
    if not 0.0 <= max_perplexity_increase <= 1.0:  # false for NaN
        raise ConfigError.out_of_bounds("max_perplexity_increase", max_perplexity_increase, "from 0 to 1 (0.01 is 1 %)")
    return log1p(max_perplexity_increase)


class _Rate:
    """An exchange rate between seconds and quality cost that is adapted after every step, by decreasing amounts."""

    def __init__(self, first: float) -> None:
        if not (first > 0.0 and isfinite(first)):
            raise ConfigError.out_of_bounds("rate", first, "seconds per nat, above 0 and finite")
        self._first = self._log = log(first)
        self._tokens = 0

    @property
    def seconds_per_nat(self) -> float:
        return inf if self._log >= self._first + log(RANGE) else exp(self._log)

    def move(self, error: float, tokens: int) -> None:
        """Adapt the rate. `error`: relative to the target; above 0 nats become dearer, 1 means twice the allowed
        amount."""
        self._tokens += tokens
        gain = max(LEAST_GAIN, FIRST_GAINS / (SETTLED_AFTER + self._tokens))
        moved = self._log + min(MOST_GAIN, gain * tokens) * max(-MOST_ERROR, min(MOST_ERROR, error))
        self._log = max(self._first - log(RANGE), min(self._first + log(RANGE), moved))


class QualityBudget:
    """A bound of nats per token, exceeded at most by a small burst.

    In each step, call `begin_step`, then for every layer `choose(..., rate, limit=limit)` and `spend`.
    """

    def __init__(self, nats_per_token: float, first_rate: float) -> None:
        """`first_rate`: preferably the tuned one. Raises `ConfigError` for nats that are negative or infinite, and for
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
        """Adapt the rate to the last step, and add the shares of this step's tokens."""
        if self._tokens and self.nats_per_token:
            self._rate.move(self._wanted / (self._tokens * self.nats_per_token) - 1.0, self._tokens)
        self._tokens, self._wanted = tokens, 0.0
        self.limit = min(self.limit, BURST_TOKENS * self.nats_per_token) + tokens * self.nats_per_token

    def spend(self, nats: float, wanted_nats: float) -> None:
        """Record that a layer spent `nats`, and would have spent `wanted_nats` at this rate without the limit.

        The rate follows `wanted_nats`: under the limit, spending meets the target at any rate.
        """
        assert nats <= self.limit, (nats, self.limit)
        self.limit -= nats
        self._wanted += wanted_nats


class TimeBudget:
    """A target of seconds per token on average, met with the highest rate and so the best quality."""

    def __init__(self, seconds_per_token: float, first_rate: float) -> None:
        """Raises `ConfigError` unless both are above 0 and finite."""
        if not (seconds_per_token > 0.0 and isfinite(seconds_per_token)):
            raise ConfigError.out_of_bounds("tpot", seconds_per_token, "seconds per token, above 0 and finite")
        self.seconds_per_token = seconds_per_token
        self._rate = _Rate(first_rate)
        self._waited: float | None = None

    @property
    def rate(self) -> float:
        """Seconds per nat; infinite where exact resolutions meet the target."""
        return self._rate.seconds_per_nat

    def note(self, seconds: float, waited_seconds: float) -> None:
        """Record a step's duration and the predicted part of it that its layers waited for missing experts.

        Only waiting depends on the rate, so errors are relative to its decaying mean. Each sequence of a batch gets a
        token from the step, so the step's seconds are those of one token.
        """
        before = waited_seconds if self._waited is None else self._waited
        self._waited = before + RECENT * (waited_seconds - before)
        scale = max(self._waited, LEAST_WAITED * self.seconds_per_token)
        self._rate.move((self.seconds_per_token - seconds) / scale, 1)
