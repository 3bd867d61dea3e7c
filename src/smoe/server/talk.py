"""The common part of chat completions and responses: a conversation that the model continues, with or without tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smoe.conversation.conversation import NEW_ANSWER, Ending
from smoe.generation.request import Request
from smoe.server.choice import ChoiceText
from smoe.server.fields import RequestFields
from smoe.server.grammar import Grammar
from smoe.server.problem import refused
from smoe.server.prompts import text_of
from smoe.server.sampled import another, sampling_of
from smoe.server.serving import Serving
from smoe.server.texts import TextRequest
from smoe.server.thinking import TOKENS, Thinking, is_open
from smoe.server.tool_calls import PARSERS, Parser, PlainText
from smoe.server.tool_rules import must_call


@dataclass
class Talk:
    """A conversation to continue, and how to continue it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools that the model may call, in the form of chat completions."""
    tool_choice: str | dict[str, Any] | None = None
    is_single_call: bool = False
    """Whether the response ends with its first call."""
    schema: dict[str, Any] | None = None
    """The JSON schema that the response must follow; None: free text."""
    schema_field: str = "response_format"
    template: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template."""
    ending: Ending = NEW_ANSWER
    max_new_tokens: int | None = None
    """The most new tokens; None: as many as the context has room for."""
    texts: int = 1
    logprobs: int | None = None


@dataclass
class Prepared:
    """The texts to generate, and how to parse them."""

    wanted: list[TextRequest]
    parser: Callable[[], Parser]
    ends_early: bool
    """Whether parsing may end a text early, so that each token must be parsed as it comes."""
    markers: dict[int, str]
    ends: frozenset[int]
    has_begun_to_think: bool | None
    """Whether the prompt ends within reasoning; None: this model or this response has no reasoning."""

    def choices(self, requests: Sequence[Request]) -> list[ChoiceText]:
        """Return the choices of `requests`, which were made from `wanted`."""
        begun = self.has_begun_to_think
        return [
            ChoiceText(request, self.parser(), self.markers, self.ends, None if begun is None else Thinking(begun))
            for request in requests
        ]


def prepare(serving: Serving, asked: RequestFields, talk: Talk, fields: dict[str, str]) -> Prepared:
    """Make the prompt's tokens, the sampling and the grammar. May take long: do not call this on the event loop's
    thread."""
    offered, must = _offered(talk)
    ids = serving.prompts.of_messages(talk.messages, offered, talk.template, fields["prompt"], talk.ending)
    room = serving.room_for(ids)
    sampling = sampling_of(asked, serving.model, room if talk.max_new_tokens is None else talk.max_new_tokens)
    serving.check(TextRequest(ids, sampling), fields)
    form = serving.prompts.tool_form if offered else None
    own = _added(serving.tokenizer, PARSERS[form].tokens) if form is not None else {}
    markers = _left_out(serving.tokenizer, own)
    grammar: Grammar | None = None
    if must:
        grammar = must_call(serving.grammars, form, own, must)
    elif talk.schema is not None:
        grammar = serving.grammars.of_schema(talk.schema, talk.schema_field)
    grammars = [grammar if grammar is None or not number else grammar.another() for number in range(talk.texts)]
    wanted = [TextRequest(ids, another(sampling, n), talk.logprobs, each) for n, each in enumerate(grammars)]
    begun = _has_begun_to_think(serving, talk, ids) if grammar is None else None  # constrained output has no reasoning
    if begun is not None:
        markers |= _left_out(serving.tokenizer, _added(serving.tokenizer, TOKENS))
    ends_early = form is not None and talk.is_single_call
    return Prepared(wanted, _parser(form, offered, talk.is_single_call), ends_early, markers, serving.ends, begun)


def _has_begun_to_think(serving: Serving, talk: Talk, ids: Sequence[int]) -> bool | None:
    """Return whether the response begins within reasoning; None where the model has no known form of reasoning."""
    begun = serving.prompts.has_begun_to_think(ids)
    if begun is None or not talk.ending.continue_final_message:
        return begun
    return is_open(text_of(talk.messages[-1].get("content"), "messages"))


def _offered(talk: Talk) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the tools that the model gets, and the tools of which it must call one (empty: it need not)."""
    choice, tools = talk.tool_choice, talk.tools
    if choice is None or choice == "auto":
        return tools, []
    if choice == "none":
        return [], []
    if choice == "required" and tools:
        return tools, tools
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        if named := [tool for tool in tools if tool["function"]["name"] == name]:
            return tools, named
    raise refused(
        "'tool_choice' must be none, auto, required or a function of 'tools'; required needs 'tools'",
        "tool_choice",
    )


def _parser(form: str | None, offered: Sequence[dict[str, Any]], is_single: bool) -> Callable[[], Parser]:
    """Return a constructor of the parser for these tools' calls; of `PlainText` for an unknown format."""
    if form is None:
        return PlainText
    return partial(PARSERS[form], [tool["function"]["name"] for tool in offered], is_single)


def _added(tokenizer: Any, texts: Sequence[str]) -> dict[str, int]:
    """Return those texts that are added tokens of the tokenizer, with their ids."""
    added = tokenizer.added_tokens_decoder
    tokens = {text: tokenizer.convert_tokens_to_ids(text) for text in texts}
    return {text: token for text, token in tokens.items() if token in added and added[token].content == text}


def _left_out(tokenizer: Any, tokens: Mapping[str, int]) -> dict[int, str]:
    """Return the special tokens among `tokens`, which decoded texts leave out."""
    added = tokenizer.added_tokens_decoder
    return {token: text for text, token in tokens.items() if added[token].special}
