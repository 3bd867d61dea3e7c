"""What each mechanism of a paper brings, step by step, compared with the lossless baselines.

On a CPU the steps are those of the disk tier; with a device that has memory of its own (a GPU, or an emulated one) also
those that need a second compute unit. Every step loads the model again, reads the same prompt, warms up on the same
tokens and decodes the same tokens, forced, so that all steps see the same text. Steps take turns in rounds, so that a
slow minute of the machine falls on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.bounds import EMULATED
from smoe.config import DEFAULT_ALPHA, EngineConfig
from smoe.generation.teacher_forcing import forced_rows
from smoe.machine.measure import describe_machine, describe_versions
from smoe.metrics import Counters

PROMPT_TOKENS, WARM_TOKENS, TIMED_TOKENS = 64, 64, 64
"""The last unless a user asks for more, or fewer."""


@dataclass(frozen=True)
class Step:
    """One line of the table: a name and the switches behind it."""

    name: str
    switches: Mapping[str, Any]
    is_placed: bool = False
    """The warm-up loads what is missing, whatever `balance` says; who is resident then stays."""


def _step(
    name: str,
    eviction: str,
    prefetch: str = "none",
    balance: str = "none",
    alpha: float = 0.0,
    is_placed: bool = False,
    **more: Any,
) -> Step:
    switches = {"eviction": eviction, "prefetch": prefetch, "balance": balance, "alpha": alpha, "prefetch_trial": True}
    return Step(name, switches | {"alpha_as_priced": alpha > 0} | more, is_placed)


_ALPHA = DEFAULT_ALPHA
ABLATIONS: dict[str, list[Step]] = {
    "smoe": [
        _step("LRU on demand", "lru"),
        _step("LRU + next gate", "lru", "next-gate"),
        _step("LFU", "lfu"),
        _step("the preset exact", "auto", "auto"),
        _step("the preset smoe-exact", "score", "auto", "auto"),
        _step("CE", "score"),
        _step("CE + next gate", "score", "next-gate"),
        _step("CE + CR", "score", alpha=_ALPHA),
        _step("CE + CR + Pre by next gate", "score", "next-gate", alpha=_ALPHA),
        _step("CE + CR + Pre", "score", "look-ahead", alpha=_ALPHA),
    ],
}
"""The steps by paper, on a machine whose only compute unit is the CPU."""

DEVICE_ABLATIONS: dict[str, list[Step]] = {
    "smoe": [
        _step("static, rest on CPU", "lru", balance="host"),
        _step("Fiddler: most used stay, rest on CPU", "lfu", balance="host", is_placed=True),
        _step("LRU on demand", "lru"),
        _step("LRU + next gate", "lru", "next-gate"),
        _step("HybriMoE's parts", "score", "next-gate", "optimal"),
        _step("LFU + BA", "lfu", balance="optimal"),
        _step("CE + BA", "score", balance="optimal"),
        _step("the preset smoe-exact", "score", "auto", "auto"),
        _step("CE", "score"),
        _step("CE + CR", "score", alpha=_ALPHA),
        _step("CE + CR + Pre", "score", "look-ahead", alpha=_ALPHA),
        _step("all four (+ BA)", "score", "look-ahead", "optimal", _ALPHA),
        _step("the preset smoe", "score", "auto", "auto", _ALPHA),
        _step("  at alpha 0.3 in any case", "score", "auto", "auto", 0.3, alpha_as_priced=False),
        _step("  BA as printed", "score", "look-ahead", "paper", _ALPHA),
        _step("  Pre by next gate", "score", "next-gate", "optimal", _ALPHA),
        _step("  Pre of all (v1)", "score", "look-ahead", "optimal", _ALPHA, prefetch_what="chosen"),
        _step("  without Pre", "score", "none", "optimal", _ALPHA),
        _step("  always Pre", "score", "look-ahead", "optimal", _ALPHA, prefetch_trial=False),
        _step("  lossless", "score", "look-ahead", "optimal"),
    ],
}
"""The steps by paper, with a device that has memory of its own. The first is the papers' baseline: what prefill has
left on the device stays, the CPU computes what is missing (llama.cpp); the second places the experts that were used
most, as Fiddler does from a profile. Every step prefetches only while that pays, but for the one that says so. The
preset is all four, each as far as it pays."""


@dataclass(frozen=True)
class Turn:
    """One step in one round."""

    step: Step
    first_seconds: float
    """Reading the prompt."""
    first_serial_seconds: float
    """What it would have taken with every expert brought in on demand: loading and computing one after the other."""
    seconds: list[float]
    """Seconds of every timed token."""
    counters: Counters
    resident_share: float
    alpha: float
    """What the step was served with: the model's own where it has been priced."""
    dilation: float
    """The dilation of an emulated device; else 1."""

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

    @property
    def first_seconds(self) -> float:
        """Median over the rounds of the time to read the prompt."""
        return median(turn.first_seconds for turn in self.turns)

    @property
    def first_serial_seconds(self) -> float:
        """Median over the rounds of the same with loads on demand."""
        return median(turn.first_serial_seconds for turn in self.turns)

    def share(self, part: Callable[[Counters], float], whole: Callable[[Counters], float]) -> float | None:
        """A ratio of two counters over all rounds; None where there is nothing to divide by."""
        total = sum(whole(turn.counters) for turn in self.turns)
        return sum(part(turn.counters) for turn in self.turns) / total if total else None

    def per_token(self, part: Callable[[Counters], float]) -> float:
        return sum(part(turn.counters) for turn in self.turns) / sum(len(turn.seconds) for turn in self.turns)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.step.name.strip(),
            "switches": dict(self.step.switches),
            "alpha": self.turns[0].alpha,
            "ttft_seconds": self.first_seconds,
            "ttft_on_demand_seconds": self.first_serial_seconds,
            "seconds_per_token": self.seconds,
            "seconds_per_token_by_round": [turn.mean_seconds for turn in self.turns],
            "ttft_seconds_by_round": [turn.first_seconds for turn in self.turns],
            "dilation_by_round": [turn.dilation for turn in self.turns],
            "hit_ratio": self.share(lambda c: c.decode_hits, lambda c: c.decode_uses),
            "host_computed_share": self.share(lambda c: c.host_computed, lambda c: c.decode_uses),
            "bytes_read_per_token": self.per_token(lambda c: c.bytes_read),
            "loads_per_token": self.per_token(lambda c: c.loads + c.prefetches),
            "substituted_share": self.share(lambda c: c.substituted, lambda c: c.routes),
            "low_score_missing_share": self.share(lambda c: c.low_score_missing, lambda c: c.routes),
            "top_score_missing_share": self.share(lambda c: c.top_score_missing, lambda c: c.routes),
            "prefetch_precision": self.share(lambda c: c.prefetches_used, lambda c: c.prefetches),
            "prefetch_top_score_share": self._top_score_share(),
            "prefetch_active_among_others": self._active_among_others(),
            "link_seconds_per_token": self.per_token(lambda c: c.read_busy_seconds),
            "host_seconds_per_token": self.per_token(lambda c: c.host_seconds),
            "wait_seconds_per_token": self.per_token(lambda c: c.wait_seconds),
            "host_wait_seconds_per_token": self.per_token(lambda c: c.host_wait_seconds),
            "look_aheads_per_token": self.per_token(lambda c: c.look_aheads),
            "look_ahead_seconds_per_token": self.per_token(lambda c: c.look_ahead_seconds),
            "expert_seconds_per_token": self.per_token(lambda c: c.compute_seconds),
            "other_layers_seconds_per_token": self.per_token(lambda c: c.dense_seconds),
            "device_wait_seconds_per_token": self.per_token(lambda c: c.device_wait_seconds),
            "python_seconds_per_token": self.per_token(lambda c: c.plan_seconds),
            "late_share": self.share(lambda c: c.late_seconds, lambda c: c.forward_seconds),
        }

    def _top_score_share(self) -> float | None:
        """The share of prefetched experts that was top-score (figure 17); None where nothing tells them apart."""
        if not self.step.switches.get("alpha"):
            return None
        return self.share(lambda c: c.prefetches_top_score, lambda c: c.prefetches)

    def _active_among_others(self) -> float | None:
        """The share of the other prefetched experts that was used."""
        if not self.step.switches.get("alpha"):
            return None
        return self.share(
            lambda c: c.prefetches_used - c.prefetches_top_score, lambda c: c.prefetches - c.prefetches_top_score
        )


def as_json(lines: Sequence[Line], config: EngineConfig, batch: int) -> dict[str, Any]:
    """An ablation's results, and what they hold for."""
    return {
        "device": config.device,
        "profile": config.profile if config.device == EMULATED else None,
        "emulated_expert_bytes": config.emulated_expert_bytes,
        "batch": batch,
        "context_tokens": config.context_tokens,
        "resident_share": lines[0].turns[0].resident_share,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "steps": [line.as_json() for line in lines],
    }


def ablate(
    steps: Sequence[Step],
    rounds: int,
    config: EngineConfig,
    rows: Sequence[Sequence[int]],
    open_model: Callable[[EngineConfig], PreTrainedModel],
    on_turn: Callable[[Step], None],
) -> list[Line]:
    """Measure all steps; `rows` are the tokens of the texts of a batch. What follows `PROMPT + WARM` of each is timed.

    Lossy steps take the alpha of `config` where it has one, else what the model was priced for, else the usual one.
    After an interrupt: the turns that had ended.
    """
    turns: dict[str, list[Turn]] = {step.name: [] for step in steps}
    with suppress(KeyboardInterrupt):
        for step in [step for _ in range(rounds) for step in steps]:
            on_turn(step)
            model = open_model(_with(step, config))
            try:
                turns[step.name].append(_turn(step, model, rows))
            finally:
                model.offload.close()  # type: ignore[operator]
                del model  # the next one needs its memory
    return [Line(step, turns[step.name]) for step in steps if turns[step.name]]


def _with(step: Step, config: EngineConfig) -> EngineConfig:
    own = {"prefetch_depth": None} | dict(step.switches)  # a step says itself what is prefetched
    wanted = replace(config, **own)
    substitutes = wanted.alpha > 0 and config.alpha > 0
    return replace(wanted, alpha=config.alpha, alpha_as_priced=False) if substitutes else wanted


def _turn(step: Step, model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Turn:
    engine: Any = model.offload
    engine.wait_ready()
    cache = engine.new_cache(len(rows))
    prompt = torch.tensor([list(row[:PROMPT_TOKENS]) for row in rows], device=model.device)
    before, started = engine.stats(), engine.now()
    model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    first, read = engine.now() - started, engine.stats() - before
    serial = read.read_busy_seconds + read.compute_seconds + read.dense_seconds
    warm = PROMPT_TOKENS + WARM_TOKENS
    with engine.loading_all() if step.is_placed else nullcontext():
        for _ in forced_rows(model, [row[PROMPT_TOKENS:warm] for row in rows], cache):
            pass
    before = engine.stats()
    timed = [row[warm:] for row in rows]
    seconds = [took for _, took in forced_rows(model, timed, cache)]
    return Turn(
        step,
        first,
        serial,
        seconds,
        engine.stats() - before,
        engine.ledger.resident_share,
        engine.config.alpha,
        engine.pacing.dilation,
    )
