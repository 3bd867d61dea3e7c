"""Questions with known answers. They are read from a file with lines of JSON, asked token by token, and scored.

A question's `format` determines what the model is given, and which output is right:

    short      the prompt; the first line must be one of the answers
    letter     the prompt, which contains the options; the first single capital letter must be the answer
    number     the prompt; the last number of the output must be the answer
    choice     the prompt followed by each of the choices; the most probable choice must be the answer
    cloze      the same by probability per character; with a `suffix`, the choice after which it is most probable

A program in a data set is never executed, so the format `code` cannot be scored here.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.errors import ContextError
from smoe.eval.texts import records, unusable
from smoe.generation.library_settings import end_tokens
from smoe.generation.teacher_forcing import forced
from smoe.models.files import DEMO_FOLDER
from smoe.models.kv_cache import RowCache

Tick = Callable[[int], None]
"""A function that is called with the number of tokens processed."""

FORMATS = ("short", "letter", "number", "choice", "cloze")
_SETTING = "questions"
"""The name of the setting that contains the path of the file with questions."""
_ANSWER_TOKENS = {"short": 12, "letter": 12, "number": 256}
_LEAST_ANSWER_TOKENS = 12
"""The smallest number of tokens that the context must have free for an answer."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LETTER = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z])")


@dataclass(frozen=True)
class Question:
    """A prompt with a known right answer."""

    prompt: str
    answers: tuple[str, ...]
    """All right answers. With choices, the first is the letter of the right choice (A is the first)."""
    format: str = "short"
    choices: tuple[str, ...] = ()
    suffix: str = ""
    """Text that follows a choice. If there is a suffix, the probability of the suffix is compared instead of the
    probability of the choice."""

    @property
    def longest(self) -> str:
        """The longest text that is processed for this question, without the model's own answer."""
        endings = [f" {choice}{self.suffix}" for choice in self.choices]
        return self.prompt + max(endings, key=len, default="")


def read_questions(path: Path | None) -> list[Question]:
    """Return the questions of a `.jsonl` file. Each line has `prompt` and `answer`, and if needed `format`, `choices`,
    `suffix` and `aliases`. Lines without an answer are skipped. `path`: None: the demo's questions."""
    path = path or DEMO_FOLDER / "questions.jsonl"
    found = [_question(record, path) for record in records(path, _SETTING) if record.get("answer") is not None]
    if not found:
        why = f'{path} has no question with an answer; a line is, for example, {{"prompt": "2 + 2 =", "answer": "4"}}'
        raise unusable(path, _SETTING, why)
    return found


def _question(record: dict[str, Any], path: Path) -> Question:
    prompt, choices = record.get("prompt"), tuple(map(str, record.get("choices") or ()))
    kind = record.get("format") or ("choice" if choices else "short")
    if not isinstance(prompt, str):
        raise unusable(path, _SETTING, f"a line of {path} has no 'prompt'; every question needs one, which is text")
    if kind not in FORMATS:
        why = f"{path} has questions of the format {kind!r}; those that can be scored: {', '.join(FORMATS)}"
        raise unusable(path, _SETTING, why)
    answer = str(record["answer"])
    if kind in ("choice", "cloze") and answer not in string.ascii_uppercase[: len(choices)]:
        why = f"a line of {path} has {len(choices)} choices and the answer {answer!r}"
        raise unusable(path, _SETTING, f"{why}; the answer must be the letter of a choice, A for the first")
    answers = (answer, *map(str, record.get("aliases") or ()))
    return Question(prompt, answers, kind, choices, str(record.get("suffix") or ""))


class Questions:
    """An exam (a function that asks a model questions) that asks these questions one after the other."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions

    def __call__(self, model: PreTrainedModel, tokenizer: Any, tick: Tick) -> list[bool]:
        return [ask(model, tokenizer, question, tick) for question in self._questions]


def fitting(questions: Sequence[Question], tokenizer: Any, context_tokens: int) -> list[Question]:
    """Return the questions that leave room for an answer in the context."""

    def needed(question: Question) -> int:
        return len(tokenizer(question.longest)["input_ids"]) + (0 if question.choices else _LEAST_ANSWER_TOKENS)

    return [question for question in questions if needed(question) <= context_tokens]


def ask(model: PreTrainedModel, tokenizer: Any, question: Question, tick: Tick) -> bool:
    """Return whether the model's answer to a question is right."""
    if question.choices:
        return string.ascii_uppercase[_choose(model, tokenizer, question, tick)] == question.answers[0]
    end = "\n\n" if question.format == "number" else "\n"
    reply = answer(model, tokenizer, question.prompt, _ANSWER_TOKENS[question.format], [end], tick)
    return is_right(reply, question)


def is_right(text: str, question: Question) -> bool:
    """Return whether a model's reply is right.

    The question's format decides. number: the last number in the reply must be an answer. letter: the first letter that
    stands alone must be an answer. Other formats: the first line must be an answer; case, punctuation and articles are
    ignored.
    """
    if question.format == "number":
        numbers = [_value(found) for found in _NUMBER.findall(text)]
        return bool(numbers) and numbers[-1] in [_value(right) for right in question.answers]
    if question.format == "letter":
        letter = _LETTER.search(text)
        return letter is not None and letter[0] in question.answers
    return _normal(text) in {_normal(right) for right in question.answers}


def _value(number: str) -> float:
    return float(number.replace(",", "").rstrip("."))


def _normal(reply: str) -> str:
    line = reply.strip().split("\n")[0].lower()
    words = line.translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in {"a", "an", "the"})


def answer(model: PreTrainedModel, tokenizer: Any, prompt: str, most: int, stops: Sequence[str], tick: Tick) -> str:
    """Return the greedy continuation of `prompt`, at most `most` tokens. It ends at an end token, or when it contains
    one of `stops`; line breaks at its beginning are ignored. Raise `ContextError` if the prompt fills the context."""
    ids = tokenizer(prompt)["input_ids"]
    cache = model.offload.new_cache()  # type: ignore[operator]
    if len(ids) >= cache.capacity_tokens:
        raise ContextError(
            f"a question of {len(ids)} tokens leaves no room for an answer in a context of {cache.capacity_tokens}; "
            "raise `context_tokens`",
            setting="context_tokens",
            given=cache.capacity_tokens,
            allowed=f"at least {len(ids) + 1} for this question",
        )
    reply: list[int] = []
    ends = end_tokens(model, tokenizer)
    for number in range(min(len(ids) + most, cache.capacity_tokens)):
        token = ids[number] if number < len(ids) else reply[-1]
        ((logits, _),) = forced(model, [token], cache)
        tick(1)
        if number >= len(ids) - 1:
            reply.append(int(logits.argmax()))
            text = tokenizer.decode(reply, skip_special_tokens=True).lstrip("\n")
            if reply[-1] in ends or any(stop in text for stop in stops):
                break
    return str(tokenizer.decode(reply, skip_special_tokens=True))


def _choose(model: PreTrainedModel, tokenizer: Any, question: Question, tick: Tick) -> int:
    """Return the index of the most probable choice of a question."""
    scores = []
    reader = Reader(model, tokenizer, tick)
    for choice in question.choices:
        if question.suffix:
            scores.append(reader.likelihood(f"{question.prompt} {choice}", question.suffix)[0])
        else:
            nats, _ = reader.likelihood(question.prompt, f" {choice}")
            scores.append(nats / len(choice) if question.format == "cloze" else nats)
    return max(range(len(scores)), key=scores.__getitem__)


class Reader:
    """Computes log likelihoods of continuations, token by token. A beginning that two successive contexts share is
    processed once."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, tick: Tick) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._tick = tick
        self._cache: RowCache = model.offload.new_cache()  # type: ignore[operator]
        self._read: list[int] = []
        """The tokens in the KV cache."""
        self._last_scores: tuple[int, torch.Tensor] = (0, torch.empty(0))
        """(a number of tokens in the KV cache, the log probabilities [V] of the next token after them)."""

    def likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Return (log probability of `continuation` after `context`, whether each token of the continuation was the
        most probable one)."""
        before, whole = self._ids(context), self._ids(context + continuation)
        if whole[: len(before)] != before or len(whole) == len(before):  # a token spans the border
            whole = before + self._tokenizer(continuation, add_special_tokens=False)["input_ids"]
        return self.likelihood_of(before or whole[:1], whole[len(before) or 1 :])

    def likelihood_of(self, before: Sequence[int], after: Sequence[int]) -> tuple[float, bool]:
        """Return the same as `likelihood` for token ids. `before` must have at least one."""
        nats, is_likeliest = 0.0, True
        log_p = self._after(before)
        for token, following in zip(after, [*after[1:], None], strict=True):
            nats += float(log_p[token])
            is_likeliest = is_likeliest and int(log_p.argmax()) == token
            if following is not None:
                log_p = self._feed([token])
        return nats, is_likeliest

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"]) if text else []

    def _after(self, before: Sequence[int]) -> torch.Tensor:
        """Return the log probabilities [V] of the next token after `before`. The KV cache then contains exactly these
        tokens."""
        pairs = enumerate(zip(before, self._read, strict=False))
        shared = next((n for n, (wanted, had) in pairs if wanted != had), min(len(before), len(self._read)))
        if not self._cache.can_rewind and shared < len(self._read):
            self._cache, self._read, shared = self._model.offload.new_cache(), [], 0  # type: ignore[operator]
        if shared == len(before) == self._last_scores[0]:
            self._forget_from(shared)
            return self._last_scores[1]
        self._forget_from(min(shared, len(before) - 1))
        log_p = self._feed(before[len(self._read) :])
        self._last_scores = len(before), log_p
        return log_p

    def _forget_from(self, length: int) -> None:
        if length < len(self._read):
            self._cache.rewind(length)
            del self._read[length:]

    def _feed(self, ids: Sequence[int]) -> torch.Tensor:
        """Process the tokens `ids`. Return the log probabilities [V] of the next token."""
        last = torch.empty(0)
        for token, (logits, _) in zip(ids, forced(self._model, ids, self._cache), strict=True):
            self._read.append(token)
            self._tick(1)
            last = logits
        return last.float().log_softmax(-1)
