"""Measures quality as users experience it: token by token, while experts are missing as in generation.

In a single forward pass over a whole text every expert is loaded and none is replaced, so substitution would seem to
cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from smoe.bounds import BF16, INT8
from smoe.config import EngineConfig
from smoe.eval.questions import Tick
from smoe.generation.teacher_forcing import forced
from smoe.runtime.engine import Engine

BLOCK_TOKENS = 64
"""The number of tokens in a block. Neighbouring tokens are similar, so confidence intervals are computed from
blocks."""

Exam = Callable[[PreTrainedModel, Any, Tick], list[bool]]
"""A function that asks a model questions, the same in each call, and returns for each question whether the answer was
right. Its arguments are model, tokenizer and `Tick`."""


class Numbers(NamedTuple):
    """The precisions of one setting: of the experts' weights, of activations, and of missing experts."""

    precision: str = "auto"
    """The precision of the experts' weights (`EngineConfig.precision`)."""
    activations: str = BF16
    """The precision of activations (`EngineConfig.activations`)."""
    low: str = ""
    """A description of the lower precision in which missing experts are computed; empty if they are not."""

    def __str__(self) -> str:
        """Return a short text of the precisions that differ from the model's own, such as `int4`, `x int8`, `int4 x
        int8` or `+int4`; empty if none differs."""
        weights = "" if self.precision == EXACT.precision else self.precision
        shown = weights if self.activations == BF16 else f"{weights} x {self.activations}".lstrip()
        return shown + (f"+{self.low.split()[0]}" if self.low else "")


EXACT = Numbers()
"""The precisions of the exact model."""


def numbers_of(config: EngineConfig) -> Numbers:
    """Return the precisions of a configuration."""
    parts = []
    if config.prices_answers:
        increase, seconds = config.max_perplexity_increase, config.tpot_seconds
        bound = f"{seconds:g} s a token" if increase is None else f"{100 * increase:g} % of perplexity"
        parts = [f"{config.low_precision if config.has_low else 'answers'} within {bound}"]
        parts += [f"share {config.low_share:g}"] if config.has_low else []
    elif config.has_low:
        parts = [f"{config.low_precision} above {config.low_threshold:g}", f"share {config.low_share:g}"]
    parts += [name for name in ("low_meanwhile", "upgrade") if getattr(config, name)]
    if config.skip_threshold < 1:
        parts.append(f"none above {config.skip_threshold:g}")
    rounded = INT8 if config.activations == INT8 else BF16  # auto: as the exact model, up to rounding
    return Numbers(config.precision, rounded, ", ".join(parts))


@dataclass
class Quality:
    """The measured quality and time of one setting."""

    alpha: float
    tokens: int = 0
    block_nats: list[float] = field(default_factory=list)
    """The negative log likelihood in nats, summed over each block."""
    block_tokens: list[int] = field(default_factory=list)
    kl: float = 0.0
    """The mean divergence of the next token's distribution from that of the exact model, in nats."""
    top1_agreement: float = 1.0
    """The fraction of tokens for which both models have the same most probable next token."""
    right: list[bool] = field(default_factory=list)
    """For each question, whether the answer was right."""
    median_seconds: float = 0.0
    """The median seconds per token."""
    hit_ratio: float = 1.0
    substituted: float = 0.0
    """The fraction of routes that a substitute computed."""
    low_score: float = 0.0
    bytes_per_token: float = 0.0
    precision: str = EXACT.precision
    activations: str = EXACT.activations
    low: str = EXACT.low
    low_served: float = 0.0
    """The fraction of expert uses that were computed with low-precision copies."""
    left_out: float = 0.0
    """The fraction of expert uses that were dropped because of low importance."""

    @property
    def numbers(self) -> Numbers:
        return Numbers(self.precision, self.activations, self.low)

    @property
    def is_base(self) -> bool:
        """Whether this is the exact model, with which all other settings are compared."""
        return self.alpha == 0 and self.numbers == EXACT

    @property
    def perplexity(self) -> float:
        return float(np.exp(sum(self.block_nats) / max(1, self.tokens)))

    @property
    def accuracy(self) -> float | None:
        return sum(self.right) / len(self.right) if self.right else None


class ExactDistributions:
    """The exact model's log probabilities [N, V] of the next token after every token, on disk. All other settings are
    compared with them."""

    def __init__(self, path: Path, tokens: int, vocabulary: int, *, is_written: bool) -> None:
        mode: Any = "r+" if is_written else "w+"
        self._rows = np.lib.format.open_memmap(path, mode=mode, dtype=np.float32, shape=(tokens, vocabulary))

    def put(self, number: int, log_probabilities: torch.Tensor) -> None:
        self._rows[number] = log_probabilities.numpy()

    def get(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self._rows[number])

    def flush(self) -> None:
        self._rows.flush()


def measure(
    model: PreTrainedModel,
    tokenizer: Any,
    alpha: float,
    documents: Sequence[Sequence[int]],
    exam: Exam | None,
    exact: ExactDistributions,
    tick: Tick,
) -> Quality:
    """Return the quality and time of one threshold: process all documents (token ids) and ask all questions, starting
    with an empty cache.

    If this is the exact model, its distributions are written to `exact`. All other settings are compared with those.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    engine.use_alpha(alpha)
    quality, seconds = Quality(alpha, **numbers_of(engine.config)._asdict()), list[float]()
    kl = agreed = 0.0
    for ids in documents:
        nats = []
        for position, (logits, took) in enumerate(forced(model, ids[:-1], engine.new_cache())):
            log_p = logits.float().log_softmax(-1)
            nats.append(-float(log_p[ids[position + 1]]))
            seconds.append(took)
            if quality.is_base:
                exact.put(quality.tokens, log_p)
            else:
                truth = exact.get(quality.tokens)
                kl += float((truth.exp() * (truth - log_p)).sum())
                agreed += float(truth.argmax() == log_p.argmax())
            quality.tokens += 1
            tick(1)
        for begin in range(0, len(nats), BLOCK_TOKENS):
            block = nats[begin : begin + BLOCK_TOKENS]
            quality.block_nats.append(sum(block))
            quality.block_tokens.append(len(block))
    if quality.is_base:
        exact.flush()
    else:
        quality.kl, quality.top1_agreement = kl / quality.tokens, agreed / quality.tokens
    if exam is not None:
        quality.right = exam(model, tokenizer, tick)
    counters = engine.stats()
    quality.median_seconds = median(seconds) if seconds else 0.0
    quality.hit_ratio = counters.hit_ratio
    quality.substituted = counters.substituted / max(1, counters.routes)
    uses = max(1, counters.decode_uses + counters.skipped)
    quality.low_served, quality.left_out = counters.low_served / uses, counters.skipped / uses
    quality.low_score = counters.low_score / max(1, counters.routes)
    quality.bytes_per_token = counters.bytes_read / max(1, counters.forward_passes)
    return quality
