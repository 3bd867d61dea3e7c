"""Generates text for prompts with the decode loop (`loop.py`), after checks, with the time of every token and counters.

An interrupt (Ctrl-C) ends a generation early, and the text so far is returned.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from smoe.errors import CheckpointError, ConfigError, ContextError
from smoe.generation.detokenizer import OnText
from smoe.generation.loop import UNSETTLED_STEPS, DecodeLoop
from smoe.generation.request import End, EndReason, Piece, Request
from smoe.generation.sampling_settings import Sampling
from smoe.machine.processor import waited_seconds
from smoe.metrics import Counters
from smoe.runtime.engine import Engine

_log = logging.getLogger(__name__)


@dataclass
class Answer:
    """The generated text for one prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    finish_reason: str = "length"
    """length (of the limit), end (the model's end token), stop (a stop string), interrupted or failed."""


@dataclass
class Generation:
    """The answers to all prompts, with times and counters. Each decode step adds one token to every row."""

    answers: list[Answer]
    started: float
    token_times: list[float]
    """The clock in seconds at the end of each step. The first element is the end of the prefill."""
    ended: float
    counters: Counters
    decode_counters: Counters
    """The counters of all steps after the first token."""
    was_interrupted: bool
    notes: list[str]
    """Messages for the user about limits that had to be lowered."""
    reused_tokens: int = 0
    """The number of prompt tokens that were reused from the KV cache."""
    waited_seconds: float | None = None
    """The seconds in which this thread was ready to run but other threads occupied the cores; None if the system does
    not measure them."""
    unsettled_counters: Counters = field(default_factory=Counters)
    """The counters of the first `UNSETTLED_STEPS` decode steps."""

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def new_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def ttft_seconds(self) -> float | None:
        """The seconds from the call to the first token; None if there is no token."""
        return self.token_times[0] - self.started if self.token_times else None

    @property
    def step_seconds(self) -> list[float]:
        """The seconds of every decode step."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def decode_seconds(self) -> float:
        return self.token_times[-1] - self.token_times[0] if self.token_times else 0.0

    @property
    def later_counters(self) -> Counters:
        """The counters of all decode steps except the first `UNSETTLED_STEPS`."""
        return self.decode_counters - self.unsettled_counters

    @property
    def later_seconds_per_token(self) -> float | None:
        """The mean seconds of all decode steps except the first `UNSETTLED_STEPS`; None if there are no others."""
        later = self.step_seconds[UNSETTLED_STEPS:]
        return statistics.fmean(later) if later else None

    @property
    def waited_share(self) -> float | None:
        """The fraction of the time in which this thread was ready to run but other threads occupied the cores; None if
        it is unknown."""
        whole = self.ended - self.started
        return None if self.waited_seconds is None or whole <= 0 else min(1.0, self.waited_seconds / whole)

    @property
    def tpot_mean_seconds(self) -> float | None:
        return statistics.fmean(self.step_seconds) if self.step_seconds else None

    @property
    def tpot_median_seconds(self) -> float | None:
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def tpot_p95_seconds(self) -> float | None:
        ordered = sorted(self.step_seconds)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else None

    @property
    def tokens_per_second(self) -> float | None:
        """The number of new tokens of all rows after the first step, divided by the seconds of these steps; None if
        there are no such steps."""
        tokens = self.new_tokens - sum(1 for answer in self.answers if answer.token_ids)
        return tokens / self.decode_seconds if self.decode_seconds > 0 else None


def generate(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[str], sampling: Sampling, on_text: OnText | None = None
) -> Generation:
    """Generate a continuation of every prompt. `on_text(row, text)` is called with new text as it is generated."""
    return generate_batch(model, tokenizer, encode(tokenizer, prompts), sampling, on_text)


def encode(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each prompt, with the tokenizer's special tokens. Raise `ConfigError` if a prompt is
    empty and the model has no token with which a text begins."""
    rows = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    for number, row in enumerate(rows, start=1):
        if not row and tokenizer.bos_token_id is not None:
            row.append(tokenizer.bos_token_id)
        if not row:
            raise ConfigError.empty_prompt(number, prompts[number - 1])
    return rows


def generate_batch(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    on_text: OnText | None = None,
    loop: DecodeLoop | None = None,
) -> Generation:
    """Generate a continuation of every prompt, given as token ids. Row n is sampled with the seed `sampling.seed` + n.

    `loop`: a loop of this model that has earlier texts in its KV cache, so that common beginnings are not computed
    again. Only this call may use it at a time.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    _check_tokens(model, tokenizer, prompts)
    notes = _room(engine, prompts, sampling.max_new_tokens)
    loop = loop or DecodeLoop(model, tokenizer, reads_first=True)
    collector = _Collector(engine, prompts, sampling, on_text)
    started, before, waited_before = engine.now(), engine.stats(), waited_seconds()
    was_interrupted = False
    try:
        for request in collector.requests:
            loop.hand_in(request)
        loop.run(until_idle=True, after_step=collector.note)
    except KeyboardInterrupt:
        was_interrupted = True
    finally:
        loop.give_up()
    ended, after = engine.now(), engine.stats()
    waited = (
        None if waited_before is None or engine.pacing.is_emulated else waited_seconds()
    )  # meaningless on an emulated device
    collector.raise_first()
    _log.info(
        "generated %d new tokens after %d tokens in the prompts of %d sequences, in %.3f s%s",
        sum(len(answer.token_ids) for answer in collector.answers),
        sum(map(len, prompts)),
        len(collector.answers),
        ended - started,
        ", interrupted" if was_interrupted else "",
    )
    return Generation(
        answers=collector.answers,
        started=started,
        token_times=collector.times,
        ended=ended,
        counters=after - before,
        decode_counters=after - (collector.after_prefill or after),
        was_interrupted=was_interrupted,
        notes=notes,
        reused_tokens=sum(request.reused_tokens for request in collector.requests),
        waited_seconds=None if waited is None or waited_before is None else waited - waited_before,
        unsettled_counters=collector.unsettled,
    )


def _check_tokens(model: PreTrainedModel, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> None:
    if not all(prompts):
        raise ConfigError(
            f"the tokenizer in {tokenizer.name_or_path} made no tokens of the prompt; give some text. If the prompt "
            "had text, check the checkpoint's chat template (chat_template.jinja) and tokenizer",
            setting="prompt",
            allowed="text of at least one token",
        )
    largest, vocabulary = max(map(max, prompts)), int(model.config.get_text_config().vocab_size)
    if largest >= vocabulary:
        raise CheckpointError(
            f"the tokenizer in {tokenizer.name_or_path} makes token {largest} of a text, but the model's config.json "
            f"has a 'vocab_size' of {vocabulary}: the two belong to different models"
        )


def _room(engine: Engine, prompts: Sequence[Sequence[int]], wanted: int) -> list[str]:
    """Return messages for the user if the context has room for fewer new tokens than `wanted`. Raise `ConfigError` for
    too many prompts, and `ContextError` for a prompt that is too long."""
    rows, tokens = len(prompts), max(map(len, prompts))
    config = engine.config
    if rows > config.max_sequences:
        raise ConfigError(
            f"{rows} prompts at once need `max_sequences={rows}`; the memory budget was made for "
            f"{config.max_sequences} sequences",
            setting="max_sequences",
            given=config.max_sequences,
            allowed=f"at least {rows} for these prompts",
        )
    if tokens >= engine.context_tokens:
        raise ContextError.of_prompt(tokens, engine.context_tokens, engine.position_limit, wanted)
    room = engine.context_tokens - tokens
    if wanted <= room:
        return []
    return [
        f"at most {room} new tokens are generated instead of {wanted}: the context of {engine.context_tokens} tokens "
        "has no room for more"
    ]


class _Collector:
    """Receives the events of the decode loop, and collects the answers and the time of every step."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, on_text: OnText | None
    ) -> None:
        self.answers = [Answer(prompt_tokens=len(prompt)) for prompt in prompts]
        self.requests = [
            Request(prompt, replace(sampling, seed=(sampling.seed + row) % 2**63), partial(self._hear, row))
            for row, prompt in enumerate(prompts)
        ]
        self.times: list[float] = []
        self.after_prefill: Counters | None = None
        self.unsettled = Counters()
        self._engine, self._on_text = engine, on_text
        self._is_news = False
        self._errors: list[Exception] = []

    def note(self) -> None:
        """Record the time at which a step has ended, once every prompt has its first token."""
        if self._is_news and all(request.new_ids or request.ended for request in self.requests):
            self.times.append(self._engine.now())
            if self.after_prefill is None:
                self.after_prefill = self._engine.stats()
            elif len(self.times) <= UNSETTLED_STEPS + 1:
                self.unsettled = self._engine.stats() - self.after_prefill
        self._is_news = False

    def raise_first(self) -> None:
        """Raise the first of the errors with which texts have ended, if there is one."""
        for error in self._errors:
            raise error

    def _hear(self, row: int, what: Piece | End) -> None:
        answer = self.answers[row]
        if isinstance(what, Piece):
            self._is_news = True
            answer.token_ids.append(what.token)
        else:
            answer.finish_reason = _REASONS[what.reason]
            if what.error is not None:
                self._errors.append(what.error)
        answer.text += what.text
        if what.text and self._on_text is not None:
            self._on_text(row, what.text)


_REASONS = {
    EndReason.LENGTH: "length",
    EndReason.END: "end",
    EndReason.STOP: "stop",
    EndReason.CANCELLED: "interrupted",
    EndReason.FAILED: "failed",
}
