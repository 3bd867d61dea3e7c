"""The endpoint `POST /v1/completions`: continues texts without a chat template."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from smoe.server.answer import EndpointAnswer, Form, head_of
from smoe.server.api_errors import refused
from smoe.server.choice import ChoiceText, Delta, TokenChances, usage_of
from smoe.server.events import event
from smoe.server.fields import MOST_TEXTS, CompletionAsked
from smoe.server.serving import Serving
from smoe.server.talk import another, grammar_of, refuse_endless, sampling_of, schema_of, texts_of
from smoe.server.texts import TextRequest, Texts
from smoe.server.token_text import TokenTexts

_USUAL_TOKENS = 16
"""OpenAI's default for `max_tokens` in plain completions."""


async def completions(serving: Serving, request: Request) -> Response:
    """Respond to a completion: continue each prompt in `n` texts, as one body or as a stream."""

    def work(asked: CompletionAsked) -> tuple[list[TextRequest], Form]:
        form = Form(asked.settings, bool(asked.stream), asked.wants_usage, asked.likeliest is not None)
        return texts_wanted(serving, asked), form

    wanted, form = await serving.read(CompletionAsked, request, work)
    texts = serving.ask(wanted, form.settings, form.is_streamed)
    return await _CompletionAnswer(serving, form, texts).to(request, form.is_streamed)


def texts_wanted(serving: Serving, asked: CompletionAsked, schema_field: str = "response_format") -> list[TextRequest]:
    """Return the texts to generate for a request. `schema_field`: the request's field that contains the schema. Raises
    an `ApiError` for prompts that cannot be continued."""
    prompts = _prompts(serving, asked.prompt)
    if len(prompts) * (asked.n or 1) > MOST_TEXTS:
        raise refused(f"a request may have at most {MOST_TEXTS} texts (prompts times 'n')", "n")
    tokens = _USUAL_TOKENS if asked.most_tokens is None else asked.most_tokens
    grammar = grammar_of(serving, asked.grammar, schema_of(asked.response_format), schema_field)
    if grammar is not None:
        refuse_endless(asked)
    wanted: list[TextRequest] = []
    for ids in prompts:
        sampling = another(sampling_of(asked, serving.model, serving.limit(ids, tokens)), len(wanted))
        own = None if grammar is None else grammar.another()
        wanted += texts_of(ids, sampling, asked.n or 1, asked.likeliest, own)
        serving.check(wanted[-1], asked.settings)
    return wanted


def _prompts(serving: Serving, given: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
    if isinstance(given, str):
        return [serving.prompts.of_text(given)]
    if isinstance(given[0], int):
        return [serving.prompts.of_tokens(given)]  # type: ignore[arg-type]
    texts = serving.prompts
    return [texts.of_text(each) if isinstance(each, str) else texts.of_tokens(each) for each in given]  # type: ignore[arg-type]


class _CompletionAnswer(EndpointAnswer):
    def __init__(self, serving: Serving, form: Form, texts: Texts) -> None:
        super().__init__(texts, [ChoiceText(request, ends=serving.ends) for request in texts.requests], form.settings)
        self._tokens, self._form = serving.tokens, form
        self._offsets = [0] * len(self._choices)
        """For each text, the number of characters of its tokens so far."""
        self._head = head_of(serving, "cmpl-") | {"object": "text_completion"}

    def _ended(self) -> dict[str, Any]:
        choices = [self._choice(index, each.text, each.chances, each) for index, each in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": usage_of(self._choices)}

    def _added(self, index: int, delta: Delta) -> bytes:
        choice = self._choices[index]
        if delta.is_empty and choice.reason is None:
            return b""
        usage = {"usage": None} if self._form.wants_usage else {}
        text = "".join(part.text for part in delta.parts)
        return event({**self._head, "choices": [self._choice(index, text, delta.chances, choice)], **usage})

    def _last(self) -> bytes:
        return event({**self._head, "choices": [], "usage": usage_of(self._choices)}) if self._form.wants_usage else b""

    def _choice(self, index: int, text: str, chances: list[TokenChances], choice: ChoiceText) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, chances) if self._form.has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, index: int, chances: list[TokenChances]) -> dict[str, Any]:
        texts = [self._tokens.of(each.token)[0] for each in chances]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [max(each.logprob, -9999.0) for each in chances],
            "top_logprobs": [_top(self._tokens, each) for each in chances],
            "text_offset": offsets,
        }


def _top(tokens: TokenTexts, chances: TokenChances) -> dict[str, float]:
    """Return {text of a token: its log probability}. If several tokens have the same text, the likeliest one counts."""
    found: dict[str, float] = {}
    for token, logprob in chances.top:
        found.setdefault(tokens.of(token)[0], max(logprob, -9999.0))
    return found
