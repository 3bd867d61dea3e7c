"""From a time per token to a threshold: measured on this machine, on real text, and remembered.

Thresholds take turns in short rounds, so that a slow minute of the machine falls on all of them; how far the rounds
differ is the noise, without which no figure is to be believed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.config import EMULATED
from smoe.errors import ConfigError
from smoe.eval.stepwise import Tick
from smoe.hardware import profile_path
from smoe.policy.trial import TURN, TURNS
from smoe.policy.tuning import (
    half_ranges,
    is_flat,
    is_within_noise,
    noise_seconds,
    predicted_seconds,
    smallest_alpha,
)
from smoe.runtime.engine import Engine
from smoe.runtime.forced import forced
from smoe.units import format_bytes, format_seconds

_ROUNDS = 3
_WARM_TOKENS = TURNS * TURN + 8
"""The cache fills, and prefetch tries itself."""
_TIMED_TOKENS = 24
_TOLERANCE = 0.1
"""A budget is met where a fresh measurement is longer by no more than this share."""
_FORMAT = 2


@dataclass(frozen=True)
class Tuning:
    """T(alpha) of one model inside one budget on this machine."""

    circumstances: dict[str, Any]
    alphas: list[float]
    rounds: list[list[float]]
    """Seconds a token (median), for each round and alpha."""

    @property
    def points(self) -> list[tuple[float, float]]:
        """(alpha, median of the rounds' seconds a token)"""
        return [(alpha, median(times)) for alpha, *times in zip(self.alphas, *self.rounds, strict=True)]

    @property
    def half_range_seconds(self) -> list[float]:
        """Of every alpha, half of what lies between its fastest and its slowest round."""
        return half_ranges(self.rounds)

    @property
    def noise_seconds(self) -> float:
        return noise_seconds(self.rounds)

    @property
    def is_flat(self) -> bool:
        """Whether alpha changes nothing that can be told from noise."""
        return is_flat(self.alphas, self.rounds)

    def alpha_for(self, seconds: float) -> float:
        """The smallest alpha that meets the budget; raises `ConfigError` where none that was measured does."""
        alpha = smallest_alpha(self.points, seconds)
        if alpha is None:
            fastest, best = min(self.points, key=lambda point: point[1])
            raise ConfigError(
                f"{format_seconds(seconds)} a token is out of reach: the fastest that was measured is "
                f"{format_seconds(best)} (+/- {format_seconds(self.noise_seconds)}), at alpha {fastest:g}; give more "
                "--memory, or a longer time"
            )
        return alpha

    def as_json(self) -> dict[str, Any]:
        return self.circumstances | {
            "points": self.points,
            "half_range_seconds": self.half_range_seconds,
            "noise_seconds": self.noise_seconds,
            "is_flat": self.is_flat,
            "seconds_by_round": self.rounds,
        }


@dataclass(frozen=True)
class Choice:
    """The alpha for a time per token, and what a fresh measurement says about it."""

    tpot_seconds: float
    alpha: float
    lowest_alpha: float
    """The choice, were the budget longer by the noise."""
    highest_alpha: float | None
    """The choice, were the budget shorter by the noise; None: it would be out of reach."""
    is_within_noise: bool
    predicted_seconds: float
    measured_seconds: float
    is_met: bool
    """Within 10 %, as measured."""


def measure_times(
    model: PreTrainedModel, alphas: Sequence[float], ids: Sequence[int], circumstances: dict[str, Any], tick: Tick
) -> Tuning:
    """T(alpha), in rounds that go through all alphas."""
    if len(ids) < turn_tokens():
        raise ConfigError(f"the text has {len(ids)} tokens; at least {turn_tokens()} are needed to measure on")
    rounds = [[_turn(model, alpha, ids, number, tick) for alpha in alphas] for number in range(_ROUNDS)]
    return Tuning(circumstances, list(alphas), rounds)


def choose(model: PreTrainedModel, tuning: Tuning, seconds: float, ids: Sequence[int], tick: Tick) -> Choice:
    """The smallest alpha that meets the budget, measured once more; raises `ConfigError` where none does."""
    points, noise, alpha = tuning.points, tuning.noise_seconds, tuning.alpha_for(seconds)
    measured = _turn(model, alpha, ids, _ROUNDS, tick)
    return Choice(
        tpot_seconds=seconds,
        alpha=alpha,
        lowest_alpha=tuning.alpha_for(seconds + noise),
        highest_alpha=smallest_alpha(points, seconds - noise),
        is_within_noise=is_within_noise(points, seconds, noise),
        predicted_seconds=predicted_seconds(points, alpha),
        measured_seconds=measured,
        is_met=measured <= (1 + _TOLERANCE) * seconds,
    )


def _turn(model: PreTrainedModel, alpha: float, ids: Sequence[int], number: int, tick: Tick) -> float:
    """Seconds a token (median) from a cold cache, warmed up on some tokens of the text, timed on those that follow.

    `number` says which part of the text; the first where there are not so many.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    need, seconds = turn_tokens(), []
    begin = number * need if len(ids) >= (number + 1) * need else 0
    engine.use_alpha(alpha)
    for position, (_, took) in enumerate(forced(model, ids[begin : begin + need], engine.new_cache())):
        if position >= _WARM_TOKENS:
            seconds.append(took)
        tick(1)
    return median(seconds)


def steps_of(alphas: Sequence[float]) -> int:
    """Tokens that `measure_times` will run."""
    return _ROUNDS * len(alphas) * turn_tokens()


def turn_tokens() -> int:
    """Tokens of one alpha in one round, and of the fresh measurement of a choice."""
    return _WARM_TOKENS + _TIMED_TOKENS


def store(tuning: Tuning) -> Path:
    """Remember a tuning for `generate --tpot`; returns where."""
    path = _path(tuning.circumstances)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    partial.write_text(json.dumps({"format": _FORMAT} | asdict(tuning), indent=2) + "\n", encoding="utf8")
    partial.replace(path)
    return path


def recall(circumstances: dict[str, Any]) -> Tuning:
    """The tuning of exactly these circumstances; raises `ConfigError` where there is none."""
    path = _path(circumstances)
    try:
        stored = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError):
        stored = {}
    if stored.get("format") != _FORMAT or stored.get("circumstances") != circumstances:
        model, memory = circumstances["model"], format_bytes(circumstances["memory_budget_bytes"])
        raise ConfigError(
            f"the time per token of {model} in {memory} with a context of {circumstances['context_tokens']} tokens has "
            "not been measured; run smoe tune once with the same --memory, --context and other options"
        )
    return Tuning(circumstances, stored["alphas"], stored["rounds"])


def circumstances_of(model: str, engine: Engine) -> dict[str, Any]:
    """What T(alpha) depends on, as far as it can be written down."""
    config = engine.config
    return {
        "model": model,
        "memory_budget_bytes": engine.ledger.budget_bytes,
        "context_tokens": engine.context_tokens,
        "slots": engine.ledger.cache_slots,
        "own_kernel": engine.executor.math.crew is not None,
        "threads": torch.get_num_threads(),
        "device": config.device if config.device != EMULATED else f"{EMULATED} {config.profile}",
        "balance": config.balance,
        "pools": config.pools,
        "eviction": config.eviction,
        "prefetch": config.prefetch,
        "substitutes": config.substitutes,
    }


def _path(circumstances: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(circumstances, sort_keys=True).encode()).hexdigest()[:16]
    return profile_path().parent / "tuned" / f"{key}.json"
