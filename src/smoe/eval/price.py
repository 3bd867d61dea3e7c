"""Measures the quality cost and the time of thresholds or lower precisions, with confidence intervals. An interrupted
measurement can be continued.

Every setting is compared with the exact model on the same tokens, so the noise of the text cancels. The confidence
interval comes from resampling blocks of tokens (and questions), the same for both.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.eval.paired_bootstrap import Change, bootstrapped
from smoe.eval.questions import Tick
from smoe.eval.stepwise import EXACT, ExactDistributions, Exam, Numbers, Quality, measure, numbers_of
from smoe.whole_file import whole_file

_log = logging.getLogger(__name__)

_LEAST_SAMPLES = 10
"""The smallest number of blocks of tokens, or of questions, for a confidence interval."""

RESULTS = "quality.json"
"""The name of the file with the results, which is written after every threshold. The exact model's distributions are in
the same folder."""


@dataclass(frozen=True)
class Price:
    """The quality and the time of one setting, compared with the exact model: one row of the table."""

    quality: Quality
    perplexity: Change
    """The relative change of the perplexity: 0.01 is one per cent more."""
    accuracy: Change | None
    """The absolute change of the accuracy: -0.01 is one percentage point less. None without questions."""

    @property
    def is_base(self) -> bool:
        """Whether this is the exact model, with which all other settings are compared, so that it has no interval."""
        return self.quality.is_base

    @property
    def has_enough_tokens(self) -> bool:
        """Whether there are enough tokens for a confidence interval of the perplexity."""
        return len(self.quality.block_nats) >= _LEAST_SAMPLES

    @property
    def has_enough_questions(self) -> bool:
        """Whether there are enough questions for a confidence interval of the accuracy."""
        return len(self.quality.right) >= _LEAST_SAMPLES

    def as_json(self) -> dict[str, Any]:
        quality = self.quality
        return {
            "precision": quality.precision,
            "activations": quality.activations,
            "low": quality.low,
            "alpha": quality.alpha,
            "tokens": quality.tokens,
            "perplexity": quality.perplexity,
            "perplexity_change": None if self.is_base else asdict(self.perplexity),
            "has_enough_tokens": self.has_enough_tokens,
            "kl_nats": quality.kl,
            "top1_agreement": quality.top1_agreement,
            "accuracy": quality.accuracy,
            "accuracy_change": asdict(self.accuracy) if self.accuracy and not self.is_base else None,
            "questions": len(quality.right),
            "has_enough_questions": self.has_enough_questions,
            "seconds_per_token": quality.median_seconds,
            "hit_ratio": quality.hit_ratio,
            "substituted_share": quality.substituted,
            "low_served_share": quality.low_served,
            "left_out_share": quality.left_out,
            "low_score_share": quality.low_score,
            "bytes_read_per_token": quality.bytes_per_token,
        }


def sweep(
    model: PreTrainedModel,
    tokenizer: Any,
    alphas: Sequence[float],
    documents: Sequence[Sequence[int]],
    exam: Exam | None,
    folder: Path,
    circumstances: dict[str, Any],
    on_alpha: Callable[[float], Tick],
) -> list[Price]:
    """Return the results of every threshold, 0 first. Results in `folder` from an earlier run are used if model, text
    and settings were the same.

    If the model has low precision (experts, activations, low-precision copies), every threshold is compared with the
    exact model, which must have been measured into `folder` before.
    """
    config: EngineConfig = model.offload.config  # type: ignore[union-attr,assignment]
    numbers = numbers_of(config)
    wanted = sorted({0.0, *alphas} if numbers == EXACT else set(alphas))
    folder.mkdir(parents=True, exist_ok=True)
    results = _Results(folder / RESULTS, circumstances)
    tokens = sum(len(ids) - 1 for ids in documents)
    vocabulary = model.config.get_text_config().vocab_size
    exact = ExactDistributions(folder / "exact.npy", tokens, vocabulary, is_written=results.base is not None)
    for alpha in wanted:
        if results.get(numbers, alpha) is None:
            results.put(measure(model, tokenizer, alpha, documents, exam, exact, on_alpha(alpha)))
            _log.info("the quality at alpha %g is measured, and stored in %s", alpha, folder)
        else:
            _log.info("the quality at alpha %g was measured before, and the stored result is used", alpha)
    base = results.base
    assert base is not None
    found = [results.get(numbers, alpha) for alpha in wanted]
    return [price_of(quality, base) for quality in found if quality is not None]


def largest_within(prices: Sequence[Price], allowed: float) -> Price:
    """Return the result with the largest alpha (threshold of expert substitution) whose perplexity rises by at most
    `allowed`, at the upper bound of the confidence interval. `prices` must include alpha 0: no substitution."""
    return max((p for p in prices if p.perplexity.high <= allowed), key=lambda price: price.quality.alpha)


def price_of(quality: Quality, base: Quality) -> Price:
    """Return the comparison of `quality` with `base`, the exact model, on the same tokens and questions."""
    counts = np.array(base.block_tokens, dtype=float)
    nats = np.array(quality.block_nats) - np.array(base.block_nats)
    perplexity = bootstrapped(lambda rows: float(np.expm1(nats[rows].sum() / counts[rows].sum())), len(nats))
    if not base.right:
        return Price(quality, perplexity, None)
    right = np.array(quality.right, dtype=float) - np.array(base.right, dtype=float)
    if quality is not base and not right.any():  # a change not seen in n questions: up to 3 / n
        return Price(quality, perplexity, Change(0.0, max(-1.0, -3 / len(right)), min(1.0, 3 / len(right))))
    return Price(quality, perplexity, bootstrapped(lambda rows: float(right[rows].mean()), len(right)))


class _Results:
    """The results of the thresholds measured so far. They are stored on disk after every threshold."""

    def __init__(self, path: Path, circumstances: dict[str, Any]) -> None:
        self._path = path
        self._content: dict[str, Any] = {"circumstances": circumstances, "qualities": []}
        if path.exists():
            earlier = json.loads(path.read_text(encoding="utf8"))
            before = earlier["circumstances"]
            differing = [name for name in {**before, **circumstances} if before.get(name) != circumstances.get(name)]
            if differing:
                name = differing[0]
                raise ConfigError(
                    f"{path} holds results of another {name.replace('_', ' ')}: {before.get(name)!r} then, "
                    f"{circumstances.get(name)!r} now; choose another `out`, or delete that file",
                    setting="out",
                    given=str(path.parent),
                    allowed="a folder that is new, or has results of the same circumstances",
                )
            self._content = earlier

    @property
    def base(self) -> Quality | None:
        """The result of the exact model; None if it was not measured."""
        return self.get(EXACT, 0.0)

    def get(self, numbers: Numbers, alpha: float) -> Quality | None:
        found = (Quality(**entry) for entry in self._content["qualities"] if entry["alpha"] == alpha)
        return next((quality for quality in found if quality.numbers == numbers), None)

    def put(self, quality: Quality) -> None:
        self._content["qualities"].append(asdict(quality))
        with whole_file(self._path) as file:
            file.write(json.dumps(self._content).encode())
