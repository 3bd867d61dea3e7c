"""What chat completions and responses have in common: a conversation that the model goes on with, perhaps by tools."""

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
    """A prompt's messages, in our own form."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """As chat completions have them."""
    tool_choice: str | dict[str, Any] | None = None
    is_single_call: bool = False
    """Whether the answer ends with its first call."""
    schema: dict[str, Any] | None = None
    """What the answer must keep to."""
    schema_field: str = "response_format"
    template: dict[str, Any] = field(default_factory=dict)
    """For the chat template."""
    ending: Ending = NEW_ANSWER
    max_new_tokens: int | None = None
    """None: as many as there is room for."""
    texts: int = 1
    logprobs: int | None = None


@dataclass
class Prepared:
    """What is handed in, and how what comes is read."""

    wanted: list[TextRequest]
    parser: Callable[[], Parser]
    ends_early: bool
    """Whether what comes may end a text, so that it is looked at as it comes."""
    markers: dict[int, str]
    ends: frozenset[int]
    has_begun_to_think: bool | None
    """Within the prompt; None: this model, or this answer, has no thoughts."""

    def choices(self, requests: Sequence[Request]) -> list[ChoiceText]:
        """The choices of the requests that were made of `wanted`."""
        begun = self.has_begun_to_think
        return [
            ChoiceText(request, self.parser(), self.markers, self.ends, None if begun is None else Thinking(begun))
            for request in requests
        ]


def prepare(serving: Serving, asked: RequestFields, talk: Talk, fields: dict[str, str]) -> Prepared:
    """Tokens, sampling, grammar. Takes a while: not for the server's own thread."""
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
    begun = _has_begun_to_think(serving, talk, ids) if grammar is None else None  # what keeps to a form is the answer
    if begun is not None:
        markers |= _left_out(serving.tokenizer, _added(serving.tokenizer, TOKENS))
    ends_early = form is not None and talk.is_single_call
    return Prepared(wanted, _parser(form, offered, talk.is_single_call), ends_early, markers, serving.ends, begun)


def _has_begun_to_think(serving: Serving, talk: Talk, ids: Sequence[int]) -> bool | None:
    """Whether the answer begins within a thought; None where this model writes none that are known here."""
    begun = serving.prompts.has_begun_to_think(ids)
    if begun is None or not talk.ending.continue_final_message:
        return begun
    return is_open(text_of(talk.messages[-1].get("content"), "messages"))


def _offered(talk: Talk) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tools that the model gets, and those one of which it must call, if it must."""
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
    """What reads the calls of these tools; plain text where there are none, or the model's form is not known."""
    if form is None:
        return PlainText
    return partial(PARSERS[form], [tool["function"]["name"] for tool in offered], is_single)


def _added(tokenizer: Any, texts: Sequence[str]) -> dict[str, int]:
    """The texts that are an added token of the tokenizer, special or not."""
    added = tokenizer.added_tokens_decoder
    tokens = {text: tokenizer.convert_tokens_to_ids(text) for text in texts}
    return {text: token for text, token in tokens.items() if token in added and added[token].content == text}


def _left_out(tokenizer: Any, tokens: Mapping[str, int]) -> dict[int, str]:
    """The special ones of these tokens: decoded texts leave them out."""
    added = tokenizer.added_tokens_decoder
    return {token: text for text, token in tokens.items() if added[token].special}
