"""What each mechanism of a paper brings, step by step, beside the lossless baselines; on the machine's own tiers.

Every step loads the model anew, reads the same prompt, warms up on the same tokens and decodes the same tokens, forced,
so that all steps see the same text. Steps take turns in rounds, so that a slow minute of the machine falls on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.config import DEFAULT_ALPHA, EngineConfig
from smoe.metrics import Counters
from smoe.runtime.forced import forced

PROMPT_TOKENS, WARM_TOKENS, TIMED_TOKENS = 64, 48, 64


@dataclass(frozen=True)
class Step:
    """One line of the table: a name and the switches behind it."""

    name: str
    switches: Mapping[str, Any]


ABLATIONS: dict[str, list[Step]] = {
    "smoe": [
        Step("LRU on demand", {"eviction": "lru", "prefetch": "none", "alpha": 0.0}),
        Step("LRU + next gate", {"eviction": "lru", "prefetch": "next-gate", "alpha": 0.0}),
        Step("score eviction (CE)", {"eviction": "score", "prefetch": "none", "alpha": 0.0}),
        Step("CE + next gate", {"eviction": "score", "prefetch": "next-gate", "alpha": 0.0}),
        Step("CE + substitution (CR)", {"eviction": "score", "prefetch": "none", "alpha": DEFAULT_ALPHA}),
        Step("CE + CR + prefetch (Pre)", {"eviction": "score", "prefetch": "next-gate", "alpha": DEFAULT_ALPHA}),
    ],
}
"""By paper. SMoE's balancer (BA) needs a second compute unit and is not among them."""


@dataclass(frozen=True)
class Turn:
    """One step in one round."""

    step: Step
    seconds: list[float]
    """Of every timed token."""
    counters: Counters

    @property
    def mean_seconds(self) -> float:
        return mean(self.seconds)


@dataclass(frozen=True)
class Line:
    """One step over all rounds."""

    step: Step
    turns: list[Turn]

    @property
    def seconds(self) -> float:
        """Median over the rounds of the mean time per token."""
        return median(turn.mean_seconds for turn in self.turns)

    def share(self, part: Callable[[Counters], float], whole: Callable[[Counters], float]) -> float | None:
        """A ratio of two counters over all rounds; None where there is nothing to divide by."""
        total = sum(whole(turn.counters) for turn in self.turns)
        return sum(part(turn.counters) for turn in self.turns) / total if total else None

    def per_token(self, part: Callable[[Counters], float]) -> float:
        return sum(part(turn.counters) for turn in self.turns) / sum(len(turn.seconds) for turn in self.turns)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.step.name,
            "switches": dict(self.step.switches),
            "seconds_per_token": self.seconds,
            "seconds_per_token_by_round": [turn.mean_seconds for turn in self.turns],
            "hit_ratio": self.share(lambda c: c.decode_hits, lambda c: c.decode_uses),
            "bytes_read_per_token": self.per_token(lambda c: c.bytes_read),
            "substituted_share": self.share(lambda c: c.substituted, lambda c: c.routes),
            "low_score_missing_share": self.share(lambda c: c.low_score_missing, lambda c: c.routes),
            "top_score_missing_share": self.share(lambda c: c.top_score_missing, lambda c: c.routes),
            "prefetch_precision": self.share(lambda c: c.prefetches_used, lambda c: c.prefetches),
            "wait_seconds_per_token": self.per_token(lambda c: c.wait_seconds),
            "expert_seconds_per_token": self.per_token(lambda c: c.compute_seconds),
            "other_layers_seconds_per_token": self.per_token(lambda c: c.dense_seconds),
            "python_seconds_per_token": self.per_token(lambda c: c.plan_seconds),
        }


def ablate(
    steps: Sequence[Step],
    rounds: int,
    config: EngineConfig,
    ids: Sequence[int],
    open_model: Callable[[EngineConfig], PreTrainedModel],
    on_turn: Callable[[Step], None],
) -> list[Line]:
    """Measure all steps; `ids` are the tokens of the text, at least `PROMPT + WARM + TIMED` of them."""
    turns: dict[str, list[Turn]] = {step.name: [] for step in steps}
    for _ in range(rounds):
        for step in steps:
            on_turn(step)
            model = open_model(replace(config, **step.switches))
            try:
                turns[step.name].append(_turn(step, model, ids))
            finally:
                model.offload.close()  # type: ignore[operator]
    return [Line(step, turns[step.name]) for step in steps]


def _turn(step: Step, model: PreTrainedModel, ids: Sequence[int]) -> Turn:
    engine: Any = model.offload
    engine.wait_ready()
    cache = engine.new_cache()
    prompt = torch.tensor([list(ids[:PROMPT_TOKENS])])
    model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    warm = PROMPT_TOKENS + WARM_TOKENS
    for _ in forced(model, ids[PROMPT_TOKENS:warm], cache):
        pass
    before = engine.stats()
    seconds = [took for _, took in forced(model, ids[warm : warm + TIMED_TOKENS], cache)]
    return Turn(step, seconds, engine.stats() - before)
