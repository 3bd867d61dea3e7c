"""From a time per token to a threshold: measured on this machine, on real text, and remembered.

Thresholds take turns in short rounds, so that a slow minute of the machine falls on all of them.
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

from smoe.errors import ConfigError
from smoe.eval.stepwise import Tick
from smoe.hardware import profile_path
from smoe.policy.tuning import smallest_alpha
from smoe.runtime.engine import Engine
from smoe.runtime.forced import forced
from smoe.units import format_bytes, format_seconds

_ROUNDS = 2
_WARM_TOKENS = 48
_TIMED_TOKENS = 48
_FORMAT = 1


@dataclass(frozen=True)
class Tuning:
    """T(alpha) of one model inside one budget on this machine."""

    circumstances: dict[str, Any]
    points: list[tuple[float, float]]
    """(alpha, median seconds a token)"""

    def alpha_for(self, seconds: float) -> float:
        """The smallest alpha that meets the budget; raises `ConfigError` where none that was measured does."""
        alpha = smallest_alpha(self.points, seconds)
        if alpha is None:
            fastest, best = min(self.points, key=lambda point: point[1])
            raise ConfigError(
                f"{format_seconds(seconds)} a token is out of reach: the fastest that was measured is "
                f"{format_seconds(best)}, at alpha {fastest:g}; give more --memory, or a longer time"
            )
        return alpha


def measure_times(
    model: PreTrainedModel, alphas: Sequence[float], ids: Sequence[int], circumstances: dict[str, Any], tick: Tick
) -> Tuning:
    """T(alpha): every threshold from a cold cache, warmed on the text's first tokens, timed on those that follow."""
    engine: Engine = model.offload  # type: ignore[assignment]
    need = _WARM_TOKENS + _TIMED_TOKENS
    if len(ids) < need:
        raise ConfigError(f"the text has {len(ids)} tokens; at least {need} are needed to measure on")
    seconds: dict[float, list[float]] = {alpha: [] for alpha in alphas}
    for number in range(_ROUNDS):
        begin = number * need if len(ids) >= (number + 1) * need else 0
        for alpha in alphas:
            engine.use_alpha(alpha)
            for position, (_, took) in enumerate(forced(model, ids[begin : begin + need], engine.new_cache())):
                if position >= _WARM_TOKENS:
                    seconds[alpha].append(took)
                tick(1)
    return Tuning(circumstances, [(alpha, median(times)) for alpha, times in seconds.items()])


def steps_of(alphas: Sequence[float]) -> int:
    """Tokens that `measure_times` will run."""
    return _ROUNDS * len(alphas) * (_WARM_TOKENS + _TIMED_TOKENS)


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
    return Tuning(circumstances, [(alpha, seconds) for alpha, seconds in stored["points"]])


def circumstances_of(model: str, engine: Engine) -> dict[str, Any]:
    """What T(alpha) depends on, as far as it can be written down."""
    config = engine.config
    return {
        "model": model,
        "memory_budget_bytes": engine.ledger.budget_bytes,
        "context_tokens": engine.context_tokens,
        "slots": engine.ledger.cache_slots,
        "own_kernel": engine.executor.crew is not None,
        "threads": torch.get_num_threads(),
        "eviction": config.eviction,
        "prefetch": config.prefetch,
        "substitutes": config.substitutes,
    }


def _path(circumstances: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(circumstances, sort_keys=True).encode()).hexdigest()[:16]
    return profile_path().parent / "tuned" / f"{key}.json"
