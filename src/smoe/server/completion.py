"""`POST /v1/completions`: texts that are gone on with as they are."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from smoe.server.choice import Choice, Said, usage_of
from smoe.server.events import DONE, PATIENCE_SECONDS, STILL_HERE, EventStream, Json, event, unless_gone
from smoe.server.fields import MOST_TEXTS, CompletionAsked
from smoe.server.problem import problem_of, refused
from smoe.server.sampled import another, sampling_of
from smoe.server.serving import Serving
from smoe.server.texts import Texts, Wanted
from smoe.server.token_text import TokenTexts

_USUAL_TOKENS = 16
"""As OpenAI has it."""


async def completions(serving: Serving, asked: CompletionAsked, request: Request) -> Response:
    """Every prompt is gone on with, `n` times; whole or as it comes."""
    asked.check_unsupported()
    serving.check_name(asked.model)
    fields = asked.settings
    wanted = await serving.prepare(lambda: _wanted(serving, asked), fields)
    texts = serving.ask(wanted, fields, bool(asked.stream))
    answer = _Answer(serving, asked, texts)
    if asked.stream:
        return EventStream(answer.events(), texts)
    return Json(await unless_gone(request, answer.whole()))


def _wanted(serving: Serving, asked: CompletionAsked) -> list[Wanted]:
    prompts = _prompts(serving, asked.prompt)
    if len(prompts) * (asked.n or 1) > MOST_TEXTS:
        raise refused(f"a request may have {MOST_TEXTS} texts at most, prompts times 'n'", "n")
    tokens = _USUAL_TOKENS if asked.max_tokens is None else asked.max_tokens
    sampling = sampling_of(asked, serving.model, tokens)
    wanted: list[Wanted] = []
    for ids in prompts:
        for _ in range(asked.n or 1):
            wanted.append(Wanted(ids, another(sampling, len(wanted)), asked.logprobs))
        serving.check(wanted[-1], asked.settings)
    return wanted


def _prompts(serving: Serving, given: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
    if isinstance(given, str):
        return [serving.prompts.of_text(given)]
    if isinstance(given[0], int):
        return [serving.prompts.of_tokens(given)]  # type: ignore[arg-type]
    texts = serving.prompts
    return [texts.of_text(each) if isinstance(each, str) else texts.of_tokens(each) for each in given]  # type: ignore[arg-type]


class _Answer:
    """One answer under way."""

    def __init__(self, serving: Serving, asked: CompletionAsked, texts: Texts) -> None:
        self._tokens, self._asked, self._texts = serving.tokens, asked, texts
        self._choices = [Choice(request, ends=serving.ends) for request in texts.requests]
        self._said = [0] * len(self._choices)
        """Characters of each text that its tokens have had so far."""
        self._head = {
            "id": "cmpl-" + secrets.token_hex(12),
            "object": "text_completion",
            "created": int(time.time()),
            "model": serving.name,
            "system_fingerprint": serving.fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        with self._texts as texts:
            try:
                while not texts.are_over:
                    for heard in await texts.next(PATIENCE_SECONDS):
                        self._choices[heard.number].take(heard.what)
            except Exception as error:
                raise problem_of(error, self._asked.settings) from error
        choices = [self._choice(index, each.text, each.said, each) for index, each in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": usage_of(self._choices)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes. What goes wrong is an event, too: the status has been sent."""
        usage = {"usage": None} if self._asked.wants_usage else {}
        with self._texts as texts:
            try:
                while not texts.are_over:
                    news, said = await texts.next(PATIENCE_SECONDS), b""
                    for heard in news:
                        choice = self._choices[heard.number]
                        delta = choice.take(heard.what)
                        if not delta.is_empty or choice.reason is not None:
                            added = self._choice(heard.number, delta.text, delta.said, choice)
                            said += event({**self._head, "choices": [added], **usage})
                    if said or not news:
                        yield said or STILL_HERE
                if usage:
                    yield event({**self._head, "choices": [], "usage": usage_of(self._choices)})
            except Exception as error:
                yield event(problem_of(error, self._asked.settings).body)
            yield DONE

    def _choice(self, index: int, text: str, said: list[Said], choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, said) if self._asked.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, index: int, said: list[Said]) -> dict[str, Any]:
        texts = [self._tokens.of(each.token)[0] for each in said]
        offsets = []
        for text in texts:
            offsets.append(self._said[index])
            self._said[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [max(each.logprob, -9999.0) for each in said],
            "top_logprobs": [_top(self._tokens, each) for each in said],
            "text_offset": offsets,
        }


def _top(tokens: TokenTexts, said: Said) -> dict[str, float]:
    """The likeliest by their texts; of several with one text the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in said.top:
        found.setdefault(tokens.of(token)[0], max(logprob, -9999.0))
    return found
