"""One text of a response (a choice), assembled from the decode loop's events."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from smoe.generation.request import End, EndReason, Piece, Request
from smoe.server.api_errors import over
from smoe.server.output.output_reader import OutputReader, Part, plain_text
from smoe.server.token_text import TokenTexts


class TokenChances(NamedTuple):
    """The log probability of a token, and the likeliest tokens at its position with their log probabilities."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    def in_words(self, texts: TokenTexts) -> dict[str, Any]:
        """Return these log probabilities in the form of chat completions, with the texts of tokens."""
        top = [_one(texts, token, logprob) for token, logprob in self.top]
        return {**_one(texts, self.token, self.logprob), "top_logprobs": top}


class Delta(NamedTuple):
    """The text, reasoning, calls and log probabilities that one event adds to a choice."""

    parts: list[Part]
    chances: list[TokenChances]

    @property
    def is_empty(self) -> bool:
        return not (self.parts or self.chances)


@dataclass
class ToolCall:
    """A tool call that the model writes, with the part of its arguments that has been generated so far."""

    id: str
    name: str
    arguments: str = ""
    """A JSON object, unless the text is cut off within it or the model writes no JSON."""


@dataclass
class ChoiceText:
    """Assembles one text of a response (a choice) from the decode loop's events. `take` processes an event and returns
    the addition to the text."""

    request: Request
    reader: OutputReader = field(default_factory=lambda: OutputReader(plain_text))
    markers: dict[int, str] = field(default_factory=dict)
    """The texts of special tokens that decoding leaves out but `reader` needs, by token id."""
    ends: frozenset[int] = frozenset()
    """The ids of end tokens, which are not part of the text."""
    counts_reasoning: bool = False
    """Whether the model may write reasoning."""
    text: str = ""
    thought: str = ""
    thought_tokens: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    chances: list[TokenChances] = field(default_factory=list)
    reason: EndReason | None = None
    """The reason why the text has ended; None while it continues."""

    def take(self, what: Piece | End) -> Delta:
        """Process one event of the decode loop, and return the text, reasoning and calls that it adds. Raises the error
        with which the text has failed, or an `ApiError` if the server has cancelled the text."""
        if isinstance(what, End):
            if what.error is not None:
                raise what.error
            if what.reason is EndReason.CANCELLED:
                raise over()
            self.reason = what.reason
            return self._keep(Delta([*self.reader.push(what.text), *self.reader.flush()], []))
        if self.reader.is_full:  # tokens that came before the text could end
            return Delta([], [])
        chances = []
        if what.logprob is not None and what.token not in self.ends:
            chances.append(
                TokenChances(what.token, what.logprob, tuple((each.token, each.logprob) for each in what.top))
            )
        self.thought_tokens += self.reader.is_reasoning
        added = self._keep(Delta(self.reader.push(self.markers.get(what.token, "") + what.text), chances))
        self.request.has_enough = self.reader.is_full
        return added

    def _keep(self, delta: Delta) -> Delta:
        for part in delta.parts:
            match part.kind:
                case "reasoning":
                    self.thought += part.text
                case "answer":
                    self.text += part.text
                case "call":
                    self.calls.append(ToolCall(part.id, part.text))
                case "arguments":
                    self.calls[-1].arguments += part.text
        self.chances += delta.chances
        return delta

    @property
    def finish_reason(self) -> str | None:
        """The reason of the end by OpenAI's names; None while the text continues."""
        if self.reason is None:
            return None
        if self.reason is EndReason.LENGTH and not self.reader.is_full:
            return "length"
        return "tool_calls" if self.calls else "stop"


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a tool call as a JSON object. If they are not a JSON object, because the text was cut off
    or the model wrote something else, return their text wrapped in an object, as in Anthropic's documentation.
    Otherwise the client would see a call with other arguments."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


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
    if any(choice.counts_reasoning for choice in choices):
        thought = sum(choice.thought_tokens for choice in choices)
        usage["completion_tokens_details"] = {"reasoning_tokens": thought}
    return usage


def _one(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    text, data = texts.of(token)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": data}
