"""Generating text: the library's own `generate` with our ears on it.

Sampling, end tokens and the loop are the library's. Ours are the streamed text, the moment of every token, stop
strings, and the refusals before any compute. An interrupt (Ctrl-C) ends a generation early and keeps what there is.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from smoe.errors import CheckpointError, ConfigError, ContextError, ModelError
from smoe.generation.detokenizer import OnText, TextStream
from smoe.generation.sampling import Sampling
from smoe.metrics import Counters
from smoe.models.kv_cache import RowCache
from smoe.runtime.engine import Engine

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Prompts of equal length, padded on the left."""

    input_ids: torch.Tensor
    """[rows, T]"""
    attention_mask: torch.Tensor
    """[rows, T], 0 at padding."""

    @property
    def prompt_tokens(self) -> int:
        """Real tokens of all rows."""
        return int(self.attention_mask.sum())


@dataclass
class Answer:
    """What one prompt got."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    finish_reason: str = "length"
    """length | end (the model's end token) | stop (a stop string) | interrupted"""


@dataclass
class Generation:
    """The answers and how long they took. One step makes one token of every row."""

    answers: list[Answer]
    started: float
    token_times: list[float]
    """Clock readings, one a step; the first ends the prefill."""
    ended: float
    counters: Counters
    decode_counters: Counters
    """From the first token on."""
    was_interrupted: bool
    notes: list[str]
    """What the user should know: a limit that was lowered, and why."""

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def new_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def ttft_seconds(self) -> float | None:
        """From the call to the first token; None where there is none."""
        return self.token_times[0] - self.started if self.token_times else None

    @property
    def step_seconds(self) -> list[float]:
        """Time of every token after the first."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def decode_seconds(self) -> float:
        return self.token_times[-1] - self.token_times[0] if self.token_times else 0.0

    @property
    def tpot_median_seconds(self) -> float | None:
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def tpot_p95_seconds(self) -> float | None:
        ordered = sorted(self.step_seconds)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all rows after the first step, over the time they took."""
        tokens = self.new_tokens - sum(1 for answer in self.answers if answer.token_ids)
        return tokens / self.decode_seconds if self.decode_seconds > 0 else None


def generate(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[str], sampling: Sampling, on_text: OnText | None = None
) -> Generation:
    """Continue every prompt. Text goes to `on_text(row, text)` as it comes."""
    return generate_batch(model, tokenizer, encode(tokenizer, prompts), sampling, on_text)


def encode(tokenizer: Any, prompts: Sequence[str]) -> Batch:
    """Prompts as token ids, the tokenizer's own special tokens included, padded on the left."""
    rows = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    for number, row in enumerate(rows, start=1):
        if not row and tokenizer.bos_token_id is not None:
            row.append(tokenizer.bos_token_id)
        if not row:
            raise ConfigError(
                f"prompt {number} is empty, and this model has no token to begin a text with; give some text",
                setting="prompt",
                given=prompts[number - 1],
                allowed="text of at least one token",
            )
    return pad(rows, pad_token(tokenizer))


def pad(rows: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """Token ids of several rows as one batch; padding goes to the left, where no answer will be."""
    width = max(len(row) for row in rows)
    ids = [[pad_id] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return Batch(torch.tensor(ids), torch.tensor(mask))


def pad_token(tokenizer: Any) -> int:
    """The tokenizer's padding token; padding is masked, so any other token does where it has none."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def generate_batch(
    model: PreTrainedModel,
    tokenizer: Any,
    batch: Batch,
    sampling: Sampling,
    on_text: OnText | None = None,
    cache: RowCache | None = None,
) -> Generation:
    """`generate` for prompts in token ids. A `cache` holds the beginning of the (one) prompt already and is
    extended."""
    engine: Engine = model.offload  # type: ignore[assignment]
    _check_tokens(model, tokenizer, batch)
    new_tokens, notes = _room(engine, batch, sampling.max_new_tokens)
    ends = set() if sampling.ignores_end else end_tokens(model, tokenizer)
    listener = _Listener(engine, tokenizer, batch, sampling, ends, on_text)
    was_interrupted = False
    torch.manual_seed(sampling.seed)
    started = engine.now()
    before = engine.stats()
    try:
        model.generate(  # type: ignore[operator]
            input_ids=batch.input_ids.to(model.device),
            attention_mask=batch.attention_mask.to(model.device),
            generation_config=generation_config(model, tokenizer, sampling, new_tokens),
            logits_processor=LogitsProcessorList([_RefuseNaN()]),
            stopping_criteria=StoppingCriteriaList([listener]),
            **({} if cache is None else {"past_key_values": cache}),
        )
    except KeyboardInterrupt:
        was_interrupted = True
    ended = engine.now()
    listener.flush(was_interrupted)
    after = engine.stats()
    _log.info(
        "%d new tokens for %d in the prompts of %d sequences in %.3f s%s",
        sum(len(answer.token_ids) for answer in listener.answers),
        batch.prompt_tokens,
        len(listener.answers),
        ended - started,
        ", interrupted" if was_interrupted else "",
    )
    return Generation(
        answers=listener.answers,
        started=started,
        token_times=listener.times,
        ended=ended,
        counters=after - before,
        decode_counters=after - (listener.after_prefill or after),
        was_interrupted=was_interrupted,
        notes=notes,
    )


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """The tokens that end a text: the checkpoint's generation config knows them, else the tokenizer."""
    own = getattr(model.generation_config, "eos_token_id", None)
    own = tokenizer.eos_token_id if own is None else own
    return set(own) if isinstance(own, (list, tuple)) else set() if own is None else {int(own)}


def _check_tokens(model: PreTrainedModel, tokenizer: Any, batch: Batch) -> None:
    if batch.input_ids.numel() == 0:
        raise ConfigError(
            f"the prompt has no tokens by the tokenizer in {tokenizer.name_or_path}; give some text, or, where there "
            "was some, look at the checkpoint's chat template (chat_template.jinja) and tokenizer",
            setting="prompt",
            allowed="text of at least one token",
        )
    largest, vocabulary = int(batch.input_ids.max()), int(model.config.get_text_config().vocab_size)
    if largest >= vocabulary:
        raise CheckpointError(
            f"the tokenizer in {tokenizer.name_or_path} makes token {largest} of a text, but the model's config.json "
            f"has a 'vocab_size' of {vocabulary}: the two belong to different models"
        )


def _room(engine: Engine, batch: Batch, wanted: int) -> tuple[int, list[str]]:
    """How many new tokens the context leaves, and a word about it; raises where the prompt alone is too long."""
    rows, tokens = batch.input_ids.shape
    config = engine.config
    if rows > config.max_sequences:
        raise ConfigError(
            f"{rows} prompts at once need `max_sequences` {rows}; the budget was made for {config.max_sequences}",
            setting="max_sequences",
            given=config.max_sequences,
            allowed=f"at least {rows} for these prompts",
        )
    if tokens >= engine.context_tokens:
        raise ContextError(
            f"the prompt has {tokens} tokens, the context reserved in the budget is {engine.context_tokens}; "
            f"shorten the prompt, or give `context_tokens` {tokens + wanted} (more context leaves less memory for "
            "experts)",
            setting="context_tokens",
            given=engine.context_tokens,
            allowed=f"at least {tokens + 1} for this prompt, {tokens + wanted} with all new tokens",
        )
    room = engine.context_tokens - tokens
    if wanted <= room:
        return wanted, []
    return room, [
        f"at most {room} new tokens instead of {wanted}: that is what the context of {engine.context_tokens} leaves"
    ]


def generation_config(model: PreTrainedModel, tokenizer: Any, sampling: Sampling, new_tokens: int) -> GenerationConfig:
    """What is left None here, the library fills in: from the checkpoint's generation config, else with its defaults."""
    ends = sorted(end_tokens(model, tokenizer))
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        **_choice(sampling),
        pad_token_id=pad_token(tokenizer),
        eos_token_id=ends or None,
        num_beams=1,
        use_cache=True,
    )
    if sampling.ignores_end:
        config.min_new_tokens = new_tokens
    return config


def _choice(sampling: Sampling) -> dict[str, Any]:
    """How a token is chosen, in the library's words."""
    given = {
        "temperature": sampling.temperature or None,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.temperature is None:  # who narrows a choice wants one
        return given | ({"do_sample": True} if sampling.top_p is not None or sampling.top_k is not None else {})
    if sampling.temperature > 0:
        given |= {"do_sample": True}
    else:  # the library's defaults, or it would warn of settings without a use
        given |= {"do_sample": False, "temperature": 1.0, "top_k": 50}
    is_all_given = None not in (sampling.top_p, sampling.top_k, sampling.repetition_penalty)
    return given | ({"no_repeat_ngram_size": 0} if is_all_given else {})


_USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}
"""What the library takes where nobody says anything."""
_RARE = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size")


def choices_of(model: PreTrainedModel, sampling: Sampling) -> dict[str, tuple[Any, str]]:
    """(value, whose it is: given, the model's, usual) of everything that decides which token is chosen."""
    given, own = _choice(sampling), model.generation_config
    if not (given.get("do_sample") if "do_sample" in given else own.do_sample):
        names: tuple[str, ...] = ("repetition_penalty",)
    else:
        names = (*_USUAL, *_RARE)
    found = {}
    for name in names:
        if given.get(name) is not None:
            found[name] = given[name], "given"
        elif getattr(own, name, None) is not None:
            found[name] = getattr(own, name), "the model's"
        elif name in _USUAL:
            found[name] = _USUAL[name], "usual"
    return found


class _Listener(StoppingCriteria):  # type: ignore[misc]
    """Hears every step's tokens, notes the moment, turns them into text and says which rows are done.

    The library asks its stopping criteria right after a token is chosen; it tells a streamer only later, so that a
    stop string would cost one token more.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, batch: Batch, sampling: Sampling, ends: set[int], on_text: OnText | None
    ) -> None:
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
        self.answers = [Answer(prompt_tokens=len(prompt)) for prompt in prompts]
        self.times: list[float] = []
        self.after_prefill: Counters | None = None
        self._is_done = [False] * len(prompts)
        self._streams = [TextStream(tokenizer, prompt, sampling.stop) for prompt in prompts]
        self._engine = engine
        self._ends = ends
        self._on_text = on_text

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """input_ids [rows, T]: the prompt and everything new; the last column is this step's."""
        tokens = input_ids[:, -1].tolist()  # waits for the device: the text cannot be shown sooner
        self.times.append(self._engine.now())
        if self.after_prefill is None:
            self.after_prefill = self._engine.stats()
        for row, token in enumerate(tokens):
            if not self._is_done[row]:
                self._take(row, token)
        return torch.tensor(self._is_done, device=input_ids.device)

    def flush(self, was_interrupted: bool) -> None:
        """The end, come what may: show what was held back."""
        for row, answer in enumerate(self.answers):
            if was_interrupted and not self._is_done[row]:
                answer.finish_reason = "interrupted"
            self._show(row, self._streams[row].flush())
            answer.text = self._streams[row].text

    def _take(self, row: int, token: int) -> None:
        answer, stream = self.answers[row], self._streams[row]
        answer.token_ids.append(token)
        if token in self._ends:
            self._is_done[row], answer.finish_reason = True, "end"
            return
        self._show(row, stream.push(token))
        if stream.found_stop:
            self._is_done[row], answer.finish_reason = True, "stop"

    def _show(self, row: int, text: str) -> None:
        if text and self._on_text is not None:
            self._on_text(row, text)


class _RefuseNaN(LogitsProcessor):  # type: ignore[misc]
    """Logits that are not numbers would silently become token 0."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if bool(torch.isnan(scores).any()):
            raise ModelError(
                f"the model computed NaN after {input_ids.shape[1]} tokens; its weights or its config.json are "
                "damaged (check with smoe verify) or its dtype is too narrow (try `dtype` bfloat16 or float32)"
            )
        return scores
