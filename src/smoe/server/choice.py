"""One text of a response (a choice), assembled from the decode loop's events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from smoe.generation.request import End, EndReason, Piece, Request
from smoe.server.problem import over
from smoe.server.thinking import Thinking
from smoe.server.token_text import TokenTexts
from smoe.server.tool_calls import Parser, PlainText, ToolCall


class TokenChances(NamedTuple):
    """A token's log probability, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    def in_words(self, texts: TokenTexts) -> dict[str, Any]:
        """Return the log probabilities in the form of chat completions."""
        top = [_one(texts, token, logprob) for token, logprob in self.top]
        return {**_one(texts, self.token, self.logprob), "top_logprobs": top}


class Delta(NamedTuple):
    """What one event adds to a choice."""

    text: str
    calls: list[ToolCall]
    chances: list[TokenChances]
    thought: str = ""

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.calls or self.chances or self.thought)


@dataclass
class ChoiceText:
    """Assembles one choice: `take` processes an event and returns what it adds."""

    request: Request
    parser: Parser = field(default_factory=PlainText)
    markers: dict[int, str] = field(default_factory=dict)
    """Texts of special tokens that decoding leaves out and that `parser` and `thinking` need, by token."""
    ends: frozenset[int] = frozenset()
    """End tokens, which are not part of the text."""
    thinking: Thinking | None = None
    """Separates reasoning from the answer; None: all text is the answer."""
    text: str = ""
    thought: str = ""
    thought_tokens: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    chances: list[TokenChances] = field(default_factory=list)
    reason: EndReason | None = None
    """Why the text has ended; None while it continues."""

    def take(self, what: Piece | End) -> Delta:
        """Process one event and return what it adds. Raises the text's error, or an `ApiError` where the server has
        cancelled the text."""
        if isinstance(what, End):
            if what.error is not None:
                raise what.error
            if what.reason is EndReason.CANCELLED:
                raise over()
            self.reason = what.reason
            return self._keep(self._read(what.text, [], is_last=True))
        if self.parser.is_full:  # tokens that came before the text could end
            return Delta("", [], [])
        chances = []
        if what.logprob is not None and what.token not in self.ends:
            chances.append(
                TokenChances(what.token, what.logprob, tuple((each.token, each.logprob) for each in what.top))
            )
        added = self._keep(self._read(self.markers.get(what.token, "") + what.text, chances))
        self.request.has_enough = self.parser.is_full
        return added

    def _read(self, text: str, chances: list[TokenChances], is_last: bool = False) -> Delta:
        thought = ""
        if self.thinking is not None:
            self.thought_tokens += self.thinking.is_thinking and not is_last
            thought, text = self.thinking.push(text)
            if is_last:
                thought, text = (some + rest for some, rest in zip((thought, text), self.thinking.flush(), strict=True))
        shown, calls = self.parser.push(text)
        if is_last:
            rest, more = self.parser.flush()
            shown, calls = shown + rest, calls + more
        return Delta(shown, calls, chances, thought)

    def _keep(self, delta: Delta) -> Delta:
        self.text += delta.text
        self.thought += delta.thought
        self.calls += delta.calls
        self.chances += delta.chances
        return delta

    @property
    def finish_reason(self) -> str | None:
        """The reason in OpenAI's terms; None while the text continues."""
        if self.reason is None:
            return None
        if self.reason is EndReason.LENGTH and not self.parser.is_full:
            return "length"
        return "tool_calls" if self.calls else "stop"


def usage_of(choices: list[ChoiceText]) -> dict[str, Any]:
    """Return the token counts of a response; a prompt that several choices share counts once."""
    prompts = {id(choice.request.ids): choice.request for choice in reversed(choices)}
    prompt, cached = (
        sum(counts) for counts in zip(*((len(r.ids), r.reused_tokens) for r in prompts.values()), strict=True)
    )
    new = sum(len(choice.request.new_ids) for choice in choices)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if any(choice.thinking is not None for choice in choices):
        thought = sum(choice.thought_tokens for choice in choices)
        usage["completion_tokens_details"] = {"reasoning_tokens": thought}
    return usage


def _one(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    text, data = texts.of(token)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": data}
