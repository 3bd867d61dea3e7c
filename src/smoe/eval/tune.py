"""Finds the threshold alpha for a time per token, measured on this machine on real text, and stores the times.

All thresholds are run one after the other in each of several short rounds, so that a slow minute of the machine affects
all of them. The variation between rounds is the noise of the measurement. If experts come from disk, times are
converted to one read rate (`policy/tuning.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.bounds import EMULATED
from smoe.errors import ConfigError
from smoe.eval.questions import Tick
from smoe.generation.teacher_forcing import forced
from smoe.load.tuned import TunedValue
from smoe.metrics import Counters
from smoe.policy.trial import TURN, TURNS
from smoe.policy.tuning import (
    Timing,
    half_ranges,
    is_flat,
    is_within_noise,
    middle_rate,
    noise_seconds,
    predicted_seconds,
    smallest_alpha,
)
from smoe.runtime.engine import Engine
from smoe.units import format_bytes, format_bytes_rate, format_seconds
from smoe.user_cache import cache_folder

_ROUNDS = 3
_WARM_TOKENS = TURNS * TURN + 8
"""The number of tokens before the measurement, in which the cache fills and prefetching is tested
(`policy/trial.py`)."""
_TIMED_TOKENS = 24
_TOLERANCE = 0.1
"""A time budget counts as met if a new measurement exceeds it by at most this fraction."""
_FIRST_TOKENS = 3
"""The number of tokens after the start with an empty cache by which the disk is measured: nearly all of their experts
are read."""


@dataclass(frozen=True)
class Tuning(TunedValue):
    """The times per token that were measured for each alpha, for one model and memory budget on this machine. They are
    stored by these circumstances."""

    kind = "tuned"
    version = 3

    circumstances: dict[str, Any]
    alphas: list[float]
    rounds: list[list[Timing]]
    """[rounds][alphas] the measured times."""
    bytes_per_second: float | None
    """The read rate to which all times are converted; None if they do not depend on it."""

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Tuning:
        rounds = [[Timing(**timing) for timing in timings] for timings in fields.pop("rounds")]
        return cls(rounds=rounds, **fields)

    @classmethod
    def path_of(cls, place: dict[str, Any]) -> Path:
        """Return the path of the file for the circumstances `place`."""
        key = hashlib.sha256(json.dumps(place, sort_keys=True).encode()).hexdigest()[:16]
        return cache_folder() / cls.kind / f"{key}.json"

    @property
    def seconds(self) -> list[list[float]]:
        """[rounds][alphas] the seconds per token, converted to `bytes_per_second`."""
        return [[timing.at_rate(self.bytes_per_second) for timing in timings] for timings in self.rounds]

    @property
    def points(self) -> list[tuple[float, float]]:
        """(alpha, median of the rounds' seconds per token) for each alpha."""
        return [(alpha, median(times)) for alpha, *times in zip(self.alphas, *self.seconds, strict=True)]

    @property
    def measured_seconds(self) -> list[float]:
        """For every alpha, the median of the measured seconds per token, not converted to one read rate."""
        return [median(timing.seconds for timing in timings) for timings in zip(*self.rounds, strict=True)]

    @property
    def rates(self) -> list[float]:
        """The read rate of every measurement in which experts were read, in bytes per second."""
        return [t.bytes_per_second for timings in self.rounds for t in timings if t.bytes_per_second is not None]

    @property
    def half_range_seconds(self) -> list[float]:
        """For every alpha, the noise of its time: half of the difference between its fastest and its slowest round, in
        seconds."""
        return half_ranges(self.seconds)

    @property
    def noise_seconds(self) -> float:
        return noise_seconds(self.seconds)

    @property
    def is_flat(self) -> bool:
        """Whether the times of different alphas differ by no more than noise."""
        return is_flat(self.alphas, self.seconds)

    @property
    def flat_seconds(self) -> float:
        """The seconds per token for any alpha, if alpha has no effect."""
        return median(seconds for _, seconds in self.points)

    def as_first_read(self, bytes_per_second: float) -> Tuning:
        """Return the tuning converted to the disk's present read rate. `bytes_per_second`: the rate in a short
        measurement now, which is compared with the rate in the first tokens of every round."""
        then = middle_rate([timing.first_bytes_per_second for timings in self.rounds for timing in timings])
        if then is None or self.bytes_per_second is None:
            return self
        return replace(self, bytes_per_second=self.bytes_per_second * bytes_per_second / then)

    def alpha_for(self, seconds: float) -> float:
        """Return the smallest alpha that meets the time budget of `seconds` per token. Raise `ConfigError` if no
        measured alpha does.

        If alpha has no effect on the time, return the smallest measured alpha, because an alpha computed from a curve
        through noise would be random.
        """
        if self.is_flat:
            best, where = self.flat_seconds, "every alpha"
            alpha = min(self.alphas) if best <= (1 + _TOLERANCE) * seconds else None
        else:
            fastest, best = min(self.points, key=lambda point: point[1])
            alpha, where = smallest_alpha(self.points, seconds), f"alpha {fastest:g}"
        if alpha is None:
            raise ConfigError(
                f"{format_seconds(seconds)} a token is out of reach: the fastest that was measured is "
                f"{format_seconds(best)} (+/- {format_seconds(self.noise_seconds)}), at {where}{self._when_read()}; "
                "give more `memory`, or a longer time",
                setting="tpot",
                given=seconds,
                allowed=f"at least {best:.3g} s here",
            )
        return alpha

    def predicted_seconds(self, alpha: float) -> float:
        """Return the expected seconds per token with this alpha."""
        return self.flat_seconds if self.is_flat else predicted_seconds(self.points, alpha)

    def _when_read(self) -> str:
        rate = self.bytes_per_second
        return "" if rate is None else f", where experts are read at {format_bytes_rate(rate)}"

    def as_json(self) -> dict[str, Any]:
        return self.circumstances | {
            "points": self.points,
            "half_range_seconds": self.half_range_seconds,
            "noise_seconds": self.noise_seconds,
            "is_flat": self.is_flat,
            "bytes_per_second": self.bytes_per_second,
            "seconds_by_round": self.seconds,
            "measured_by_round": [[asdict(timing) for timing in timings] for timings in self.rounds],
        }


@dataclass(frozen=True)
class AlphaChoice:
    """The alpha chosen for a time per token, and the result of a new measurement with this alpha."""

    tpot_seconds: float
    alpha: float
    lowest_alpha: float
    """The alpha for a time budget that is longer by the noise."""
    highest_alpha: float | None
    """The alpha for a time budget that is shorter by the noise; None if no alpha meets it."""
    is_within_noise: bool
    predicted_seconds: float
    measured_seconds: float
    """The measured seconds per token."""
    measured_bytes_per_second: float | None
    """The read rate during the new measurement, in bytes per second."""
    rescaled_seconds: float
    """The measured seconds per token, converted to the read rate of the prediction."""
    is_met: bool
    """Whether the converted time exceeds the time budget by at most 10 %."""


def measure_times(
    model: PreTrainedModel, alphas: Sequence[float], ids: Sequence[int], circumstances: dict[str, Any], tick: Tick
) -> Tuning:
    """Return the time per token for every alpha. It is measured in several rounds, each of which runs every alpha."""
    context_tokens = model.offload.context_tokens  # type: ignore[union-attr]
    if context_tokens < turn_tokens():
        raise ConfigError(
            f"`context_tokens={context_tokens}` is too short for the measurement; give at least {turn_tokens()} tokens",
            setting="context_tokens",
            given=context_tokens,
            allowed=f"at least {turn_tokens()}",
        )
    if len(ids) < turn_tokens():
        raise ConfigError.too_few_tokens("text", len(ids), turn_tokens(), "to measure on")
    rounds = [[_turn(model, alpha, ids, number, tick) for alpha in alphas] for number in range(_ROUNDS)]
    rate = middle_rate([timing.bytes_per_second for timings in rounds for timing in timings])
    return Tuning(circumstances, list(alphas), rounds, rate)


def choose(model: PreTrainedModel, tuning: Tuning, seconds: float, ids: Sequence[int], tick: Tick) -> AlphaChoice:
    """Return the smallest alpha that meets the time budget of `seconds` per token, with a new measurement. Raise
    `ConfigError` if no alpha meets it."""
    points, noise, alpha = tuning.points, tuning.noise_seconds, tuning.alpha_for(seconds)
    measured = _turn(model, alpha, ids, _ROUNDS, tick)
    rescaled = measured.at_rate(tuning.bytes_per_second)
    return AlphaChoice(
        tpot_seconds=seconds,
        alpha=alpha,
        lowest_alpha=alpha if tuning.is_flat else tuning.alpha_for(seconds + noise),
        highest_alpha=alpha if tuning.is_flat else smallest_alpha(points, seconds - noise),
        is_within_noise=not tuning.is_flat and is_within_noise(points, seconds, noise),
        predicted_seconds=tuning.predicted_seconds(alpha),
        measured_seconds=measured.seconds,
        measured_bytes_per_second=measured.bytes_per_second,
        rescaled_seconds=rescaled,
        is_met=rescaled <= (1 + _TOLERANCE) * seconds,
    )


def look_at_reading(model: PreTrainedModel) -> float | None:
    """Return the present read rate of experts in bytes per second, from a few tokens that start with an empty cache;
    None if no experts are read.

    Whole tokens are processed, because the processor's other work can double or halve the read rate.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    engine.use_alpha(engine.config.alpha)
    return _rate(_tokens(model, range(1, 1 + _FIRST_TOKENS), lambda _: None)) if _depends_on_disk(engine) else None


def _turn(model: PreTrainedModel, alpha: float, ids: Sequence[int], number: int, tick: Tick) -> Timing:
    """Return the median times of a token in one run with this alpha. The run starts with an empty cache, and its first
    tokens are not measured.

    `number`: the part of the text that is used; the first part if the text is too short.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    need = turn_tokens()
    begin = number * need if len(ids) >= (number + 1) * need else 0
    engine.use_alpha(alpha)
    tokens = _tokens(model, ids[begin : begin + need], tick)
    timed = tokens[_WARM_TOKENS:]
    seconds = median(took for took, _ in timed)
    if not _depends_on_disk(engine):
        return Timing(seconds)
    return Timing(
        seconds,
        reading_seconds=median(counts.read_busy_seconds for _, counts in timed),
        waiting_seconds=median(counts.wait_seconds for _, counts in timed),
        bytes_per_second=_rate(timed),
        first_bytes_per_second=_rate(tokens[:_FIRST_TOKENS]),
    )


def _tokens(model: PreTrainedModel, ids: Sequence[int], tick: Tick) -> list[tuple[float, Counters]]:
    """Return (seconds, counters) of every token."""
    engine: Engine = model.offload  # type: ignore[assignment]
    tokens, before = [], engine.stats()
    for _, took in forced(model, ids, engine.new_cache()):
        after = engine.stats()
        tokens.append((took, after - before))
        before = after
        tick(1)
    return tokens


def _rate(tokens: Sequence[tuple[float, Counters]]) -> float | None:
    """Return the median of the tokens' read rates in bytes per second; None if nothing was read."""
    return middle_rate([c.bytes_read / c.read_busy_seconds for _, c in tokens if c.bytes_read and c.read_busy_seconds])


def _depends_on_disk(engine: Engine) -> bool:
    """Return whether waiting for experts means waiting for the disk. Experts come from elsewhere if the device has a
    link, and there is no waiting if every expert is resident."""
    is_all_here = engine.ledger.holds_all
    return engine.executor.device.type == "cpu" and not engine.pacing.is_emulated and not is_all_here


def steps_of(alphas: Sequence[float]) -> int:
    """Return the number of tokens that `measure_times` processes."""
    return _ROUNDS * len(alphas) * turn_tokens()


def turn_tokens() -> int:
    """Return the number of tokens of one run: for one alpha in one round, or for the new measurement of the chosen
    alpha."""
    return _WARM_TOKENS + _TIMED_TOKENS


def recall(circumstances: dict[str, Any]) -> Tuning:
    """Return the stored times that were measured in these circumstances. Raise `ConfigError` if there are none."""
    found = Tuning.stored(circumstances)
    if found is None or found.circumstances != circumstances:
        model, memory = circumstances["model"], format_bytes(circumstances["memory_budget_bytes"])
        raise ConfigError(
            f"the time per token of {model} in {memory} with a context of {circumstances['context_tokens']} tokens has "
            "not been measured; run smoe tune once with the same `memory`, `context_tokens` and other settings",
            setting="tpot",
            allowed="only for what smoe tune has measured",
        )
    return found


def circumstances_of(model: str, engine: Engine) -> dict[str, Any]:
    """Return the circumstances on which the time of an alpha depends, such as model, budget and machine, as far as they
    are known."""
    config = engine.config
    return {
        "model": model,
        "memory_budget_bytes": engine.ledger.budget_bytes,
        "context_tokens": engine.context_tokens,
        "slots": engine.ledger.cache_slots,
        "arithmetic": engine.arithmetic,
        "threads": torch.get_num_threads(),
        "device": config.device if config.device != EMULATED else f"{EMULATED} {config.profile}",
        "balance": config.balance,
        "pools": config.pools,
        "eviction": config.eviction,
        "prefetch": config.prefetch,
        "substitutes": config.substitutes,
    }
