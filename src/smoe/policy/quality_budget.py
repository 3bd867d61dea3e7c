"""Adapts the rate at which layers trade quality for time (seconds per nat) to the user's target.

The target is either a bound on quality (nats per token, `QualityBudget`) or on time (seconds per token, `TimeBudget`).
Nats and seconds both add up over layers and steps, so the best plan has one rate for all of them: the rate at which the
average spending equals the target. This rate is unknown at first and is adapted:

    spending above the target -> the rate is multiplied by a factor above 1, so that a nat costs more seconds
    spending below the target -> the rate is multiplied by a factor below 1

The changes are large at first and small later, so that the rate settles. A bound on quality is also a guarantee: each
token adds its share to the nats that may be spent, and unspent nats are limited to the shares of `BURST_TOKENS` tokens.

    spent so far <= (tokens so far + BURST_TOKENS) * nats per token, always

Nothing here reads a clock: spending is an argument.
"""

from __future__ import annotations

from math import exp, inf, isfinite, log, log1p

from smoe.errors import ConfigError

BURST_TOKENS = 8
"""The number of tokens whose unspent nats may be spent later."""
LEAST_GAIN = 0.005
"""The smallest gain: the change of the rate's logarithm after a token whose spending was twice the target. If spending
varies by 30 % from token to token, the rate then varies by about 2 %."""
FIRST_GAINS, SETTLED_AFTER = 4.0, 8
"""At first the gain is FIRST_GAINS / (SETTLED_AFTER + tokens). Spending falls about as the rate to the power of -0.4.
With half these gains, a rate that starts 20 times too high would still be 8 % off after 600 tokens."""
MOST_GAIN = 0.25
"""The largest gain in one step, however many tokens the step has."""
MOST_ERROR = 3.0
RANGE = 1e4
"""The rate stays within this factor of its first value. At the upper end it becomes infinite, which means exact."""
RECENT = 0.05
"""The weight of the last step in the decaying mean of waiting seconds."""
LEAST_WAITED = 1e-3
"""The least fraction of a token's time that is assumed to be waiting."""


def nats_of_perplexity(max_perplexity_increase: float) -> float:
    """Return the nats per token by which the cross-entropy may rise if the perplexity may rise by this fraction (0.01:
    one percent). Raise `ConfigError` if the fraction is not a number from 0 to 1."""
    if not 0.0 <= max_perplexity_increase <= 1.0:  # false for NaN
        raise ConfigError.out_of_bounds("max_perplexity_increase", max_perplexity_increase, "from 0 to 1 (0.01 is 1 %)")
    return log1p(max_perplexity_increase)


class _Rate:
    """A rate in seconds per nat that is adapted after every step, by ever smaller amounts."""

    def __init__(self, first: float) -> None:
        if not (first > 0.0 and isfinite(first)):
            raise ConfigError.out_of_bounds("rate", first, "seconds per nat, above 0 and finite")
        self._first = self._log = log(first)
        self._tokens = 0

    @property
    def seconds_per_nat(self) -> float:
        return inf if self._log >= self._first + log(RANGE) else exp(self._log)

    def move(self, error: float, tokens: int) -> None:
        """Adapt the rate. `error`: the difference of spending and target, as a fraction of the target. Above 0 the rate
        rises; 1 means twice the allowed amount."""
        self._tokens += tokens
        gain = max(LEAST_GAIN, FIRST_GAINS / (SETTLED_AFTER + self._tokens))
        moved = self._log + min(MOST_GAIN, gain * tokens) * max(-MOST_ERROR, min(MOST_ERROR, error))
        self._log = max(self._first - log(RANGE), min(self._first + log(RANGE), moved))


class QualityBudget:
    """A limit of nats per token. The tokens so far never spend more than (their number + `BURST_TOKENS`) times this
    limit.

    In each step, call `begin_step`, then for every layer `choose(..., rate, limit=limit)` and `spend`.
    """

    def __init__(self, nats_per_token: float, first_rate: float) -> None:
        """`first_rate`: the rate to begin with, preferably the tuned one. Raise `ConfigError` if `nats_per_token` is
        negative or infinite, or if `first_rate` is not above 0."""
        if not (nats_per_token >= 0.0 and isfinite(nats_per_token)):
            raise ConfigError.out_of_bounds("nats_per_token", nats_per_token, "0 or more, and finite")
        self.nats_per_token = nats_per_token
        self.limit = BURST_TOKENS * nats_per_token
        """The nats that may be spent now."""
        self._rate = _Rate(first_rate)
        self._tokens = 0
        self._wanted = 0.0

    @property
    def rate(self) -> float:
        """The rate in seconds per nat; infinite if no nats may be spent."""
        return self._rate.seconds_per_nat if self.nats_per_token else inf

    def begin_step(self, tokens: int) -> None:
        """Adapt the rate to the spending of the last step, and add the nats that this step's tokens allow to the
        limit."""
        if self._tokens and self.nats_per_token:
            self._rate.move(self._wanted / (self._tokens * self.nats_per_token) - 1.0, self._tokens)
        self._tokens, self._wanted = tokens, 0.0
        self.limit = min(self.limit, BURST_TOKENS * self.nats_per_token) + tokens * self.nats_per_token

    def spend(self, nats: float, wanted_nats: float) -> None:
        """Record that a layer spent `nats`, and that it would have spent `wanted_nats` at this rate without the limit.

        The rate is adapted to `wanted_nats`. With the limit, spending would meet the target at any rate.
        """
        assert nats <= self.limit, (nats, self.limit)
        self.limit -= nats
        self._wanted += wanted_nats


class TimeBudget:
    """A target of seconds per token on average. The rate in seconds per nat is as high as the target permits, because a
    high rate means good quality."""

    def __init__(self, seconds_per_token: float, first_rate: float) -> None:
        """`first_rate`: the rate to begin with, in seconds per nat. Raise `ConfigError` unless this rate and the target
        are above 0 and finite."""
        if not (seconds_per_token > 0.0 and isfinite(seconds_per_token)):
            raise ConfigError.out_of_bounds("tpot", seconds_per_token, "seconds per token, above 0 and finite")
        self.seconds_per_token = seconds_per_token
        self._rate = _Rate(first_rate)
        self._waited: float | None = None

    @property
    def rate(self) -> float:
        """The rate in seconds per nat; infinite if exact resolutions meet the target."""
        return self._rate.seconds_per_nat

    def note(self, seconds: float, waited_seconds: float) -> None:
        """Record a step's duration, and the predicted part of it in which layers waited for missing experts.

        The rate is adapted to the difference between the target and the step's duration. Since the rate can shorten
        only the waiting, the difference is divided by the decaying mean of the waiting seconds. Each sequence of a
        batch gets one token from the step, so the step's seconds are the seconds of one token.
        """
        before = waited_seconds if self._waited is None else self._waited
        self._waited = before + RECENT * (waited_seconds - before)
        scale = max(self._waited, LEAST_WAITED * self.seconds_per_token)
        self._rate.move((self.seconds_per_token - seconds) / scale, 1)
