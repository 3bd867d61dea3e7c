"""The common part of chat completions and responses: a conversation that the model continues, with or without tools.
Its fields become sampling settings; fields that a request leaves out have the model's own values."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from smoe.conversation.conversation import NEW_ANSWER, Ending
from smoe.generation.library_settings import COLDEST
from smoe.generation.prompt_images import PromptImages
from smoe.generation.request import Request
from smoe.generation.sampling_settings import Sampling
from smoe.server.api_errors import refused
from smoe.server.choice import ChoiceText
from smoe.server.constraints import Both, Copied
from smoe.server.fields import Completing, GivenGrammar, RequestFields, ResponseFormat
from smoe.server.grammar import Grammar
from smoe.server.image_prompts import Prompt
from smoe.server.output.output_format import IN_REASONING, At
from smoe.server.output.output_reader import OutputReader, plain_text
from smoe.server.output.rules import Rules
from smoe.server.prompts import text_of
from smoe.server.serving import Serving
from smoe.server.texts import TextRequest
from smoe.server.thinking_budget import ThinkingBudget

_ANY_SEED = -1
"""The seed that means "no seed" in vLLM and llama.cpp."""


@dataclass
class Talk:
    """A conversation that the model continues: its messages, tools and settings."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools that the model may call, in the form of chat completions."""
    enforced: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{name of a function: the schema that its arguments must match, also where no call is required}; the model does
    not get this schema."""
    tool_choice: str | dict[str, Any] | None = None
    is_single_call: bool = False
    """Whether the response ends with its first call."""
    schema: dict[str, Any] | None = None
    """The JSON schema that the response must follow; None: free text."""
    schema_field: str = "response_format"
    grammar: str | GivenGrammar | None = None
    """The grammar that the response must follow."""
    thinking_tokens: int | None = None
    """The maximum number of tokens of reasoning; None: as many as `asked` says."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template."""
    ending: Ending = NEW_ANSWER
    max_new_tokens: int | None = None
    """The maximum number of new tokens; None or -1: as many as the context has room for."""
    texts: int = 1
    logprobs: int | None = None


@dataclass
class Prepared:
    """The texts to generate for one request, and what is needed to parse them."""

    wanted: list[TextRequest]
    reader: Callable[[], OutputReader]
    ends_early: bool
    """Whether parsing can end a text before the model does, so that each token must be parsed at once."""
    markers: dict[int, str]
    ends: frozenset[int]
    has_reasoning: bool
    """Whether the response may contain reasoning."""

    @classmethod
    def plain(cls, wanted: list[TextRequest], ends: frozenset[int]) -> Prepared:
        """Return `texts` prepared for parsing as plain text, with neither reasoning nor tool calls."""
        reader = partial(OutputReader, plain_text)
        return cls(wanted, reader, ends_early=False, markers={}, ends=ends, has_reasoning=False)

    def choices(self, requests: Sequence[Request]) -> list[ChoiceText]:
        """Return one `ChoiceText` for each of `requests`, which were made from the texts of `wanted`."""
        return [ChoiceText(request, self.reader(), self.markers, self.ends, self.has_reasoning) for request in requests]


def prepare(serving: Serving, asked: RequestFields, talk: Talk, fields: dict[str, str]) -> Prepared:
    """Make the prompt's tokens, the sampling and the grammar. May take long: do not call this on the event loop's
    thread."""
    offered, must = _offered(talk)
    is_free = not must and talk.schema is None and talk.grammar is None
    may_call = bool(must) or _may_call_or_answer(serving, talk, offered)
    if not is_free:
        talk = replace(talk, template=thinking(talk.template, False))
    ids, images = prompt_of(serving, talk, fields["prompt"])
    at = _place(serving, talk, ids)
    if not is_free:
        ids = [*ids, *_tokens_before_enforced(serving, at, is_call=may_call)]
        at = at if at == "beginning" else "answer"
    sampling = sampling_of(asked, serving.model, serving.limit(ids, talk.max_new_tokens))
    serving.check(TextRequest(ids, sampling), fields)
    own = _added_within(serving.tokenizer, serving.prompts.format.texts)
    grammar = _grammar(serving, talk, must, offered if may_call else [], own)
    if grammar is not None:
        refuse_endless(asked)
    budget = asked.thinking_budget_tokens if talk.thinking_tokens is None else talk.thinking_tokens
    constraint: Copied | None = grammar
    if grammar is None:
        constraint, end = _calls_grammar(serving, talk, offered, own), _thinking_budget(serving, at, offered, budget)
        if end is not None:
            constraint = end if constraint is None else Both(constraint, end)
    wanted = texts_of(ids, sampling, talk.texts, talk.logprobs, constraint, images)
    markers = _left_out(serving.tokenizer, own)
    return Prepared(
        wanted,
        _reader(serving, talk, at, offered if is_free or may_call else None, markers.values(), must_call=bool(must)),
        ends_early=bool(offered) and talk.is_single_call,
        markers=markers,
        ends=serving.ends,
        has_reasoning=grammar is None and serving.prompts.format.reasons,
    )


def template_of(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Return the variables for the chat template: those that a request gives, and its reasoning effort."""
    template = dict(given or {})
    if effort is not None:
        template.setdefault("reasoning_effort", effort)
    return thinking(template, False) if effort == "none" else template


def thinking(template: Mapping[str, Any], is_on: bool) -> dict[str, Any]:
    """Return the chat template's variables with reasoning turned on or off. The names are those that templates use.
    Variables that are already in `template` are unchanged."""
    return {"enable_thinking": is_on, "thinking": is_on, **template}


def prompt_of(serving: Serving, talk: Talk, param: str) -> Prompt:
    """Return the tokens and images of the conversation's prompt. `param`: the request's field that messages name."""
    offered, _ = _offered(talk)
    return serving.prompts.of_messages(talk.messages, offered, talk.template, param, talk.ending)


def _may_call_or_answer(serving: Serving, talk: Talk, offered: Sequence[dict[str, Any]]) -> bool:
    """Return whether the response may be a call although its answer must match a schema."""
    if not offered or talk.schema is None or talk.grammar is not None:
        return False
    return serving.prompts.format.can_call_or_json(talk.schema)


def _grammar(
    serving: Serving,
    talk: Talk,
    must: Sequence[dict[str, Any]],
    callable: Sequence[dict[str, Any]],
    own: Mapping[str, int],
) -> Grammar | None:
    """Return the grammar that the response must match; None if it need not match any. `must`: the tools of which it
    must call one; `callable`: those that it may call."""
    if must:
        if not serving.prompts.format.has_calls:
            message = "this model's format of tool calls is not known; give 'tool_choice' auto"
            raise refused(message, "tool_choice", "unsupported_parameter")
        rules = serving.prompts.format.must_call(Rules(own), _as_enforced(talk, must))
        return serving.grammars.of_lark(rules, "tools")
    grammar = grammar_of(serving, talk.grammar, talk.schema, talk.schema_field)
    if talk.schema is None or not callable:
        return grammar
    rules = serving.prompts.format.call_or_json(Rules(own), _as_enforced(talk, callable), talk.schema)
    return serving.grammars.of_lark(rules, talk.schema_field)


def _calls_grammar(
    serving: Serving, talk: Talk, offered: Sequence[dict[str, Any]], own: Mapping[str, int]
) -> Grammar | None:
    """Return the grammar that calls within a free text must match. None if no function's arguments are enforced, or if
    the model's format has no token that begins a call."""
    if not talk.enforced or not offered or not serving.prompts.format.has_calls:
        return None
    rules = serving.prompts.format.text_or_calls(Rules(own), _as_enforced(talk, offered), sorted(serving.ends))
    return None if rules is None else serving.grammars.of_lark(rules, "tools")


def _as_enforced(talk: Talk, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions of `tools`, with the schemas that their arguments must match."""
    functions = [tool["function"] for tool in tools]
    return [
        {**each, "parameters": talk.enforced[each["name"]]} if each["name"] in talk.enforced else each
        for each in functions
    ]


def grammar_of(
    serving: Serving, given: str | GivenGrammar | None, schema: dict[str, Any] | None, schema_field: str
) -> Grammar | None:
    """Return the grammar of a request that may have a grammar or a JSON schema; None if it has neither. Raises an
    `ApiError` if it has both."""
    if given is None:
        return None if schema is None else serving.grammars.of_schema(schema, schema_field)
    if schema is not None:
        raise refused(f"'grammar' and '{schema_field}' exclude each other; leave one out", "grammar")
    return serving.grammars.of_given(given)


def schema_of(form: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the JSON schema that the response must follow; None for free text."""
    if form is None or form.type == "text":
        return None
    given = form.schema_ if form.json_schema is None else form.json_schema.schema_
    if form.type == "json_object":
        return {"type": "object"} if given is None else given
    if given is None:
        raise refused(
            "'response_format' of the type json_schema needs a 'json_schema' with a 'schema'", "response_format"
        )
    return given


def _place(serving: Serving, talk: Talk, ids: Sequence[int]) -> At:
    """Return the position in the output's structure (reasoning, answer) at which the prompt ends."""
    if talk.ending.continue_final_message:
        last = text_of(talk.messages[-1].get("content"), "messages")
        return serving.prompts.format.place_within(last)
    return serving.prompts.place_of(ids)


def _tokens_before_enforced(serving: Serving, at: At, *, is_call: bool) -> list[int]:
    """Return the tokens that end a prompt for an answer that must match a grammar, after a prompt that ends at `at`."""
    text = serving.prompts.format.before_enforced(at, is_call=is_call)
    tokens: list[int] = serving.tokenizer.encode(text, add_special_tokens=False)
    return tokens


def _thinking_budget(
    serving: Serving, at: At, offered: Sequence[dict[str, Any]], budget_tokens: int | None
) -> ThinkingBudget | None:
    """Return the constraint that limits reasoning. None if there is no limit, or if the model's format has no marks
    around reasoning."""
    form = serving.prompts.format
    if budget_tokens is None or budget_tokens < 0 or form.reasoning is None:
        return None
    ways_out = form.ways_out([tool["function"]["name"] for tool in offered])
    return ThinkingBudget(serving.tokenizer, form.reasoning, ways_out, budget_tokens, at in IN_REASONING)


def _reader(
    serving: Serving,
    talk: Talk,
    at: At,
    offered: Sequence[dict[str, Any]] | None,
    special: Collection[str],
    *,
    must_call: bool,
) -> Callable[[], OutputReader]:
    """Return a function that makes a new parser for each text of a response. `offered`: the tools that the model may
    call; None: the response is an answer without header, reasoning or calls."""
    reads = plain_text if offered is None else serving.prompts.format.reads(at, bool(offered))
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in offered or ()}
    return partial(
        OutputReader, reads, tools, is_single=talk.is_single_call, calls_only=must_call, hidden=tuple(special)
    )


def _offered(talk: Talk) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return two lists: the tools that the model gets, and the tools of which it must call one. The second is empty if
    the model need not call a tool."""
    choice, tools = _allowed(talk.tool_choice, talk.tools)
    if choice is None or choice == "auto":
        return tools, []
    if choice == "none":
        return [], []
    if choice in ("required", "any") and tools:
        return tools, tools
    named = [tool for tool in tools if isinstance(choice, dict) and tool["function"]["name"] == _name_of(choice)]
    if named:
        return tools, named
    raise refused(
        "'tool_choice' must be none, auto, required or a function of 'tools'; required needs 'tools'",
        "tool_choice",
    )


def _allowed(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]]
) -> tuple[str | dict[str, Any] | None, list[dict[str, Any]]]:
    """Return a request's `tool_choice` in its shortest form, and the tools that this choice allows."""
    if not isinstance(choice, dict) or choice.get("type") in ("function", "tool"):
        return choice, tools
    if choice.get("type") != "allowed_tools":
        return choice.get("type"), tools
    allowed = choice.get("allowed_tools", choice)  # chat completions have it one level deeper than responses
    names = [_name_of(tool) for tool in allowed.get("tools") or ()] if isinstance(allowed, dict) else []
    found = [tool for tool in tools if tool["function"]["name"] in names]
    return (allowed.get("mode", "auto") if found else "allowed_tools"), found


def _name_of(tool: Any) -> Any:
    """Return the function name in a `tool_choice`; None if it names no function."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    return inner.get("name") if isinstance(inner, dict) else None


def _added_within(tokenizer: Any, texts: str) -> dict[str, int]:
    """Return the added tokens of the tokenizer that `texts` contains, with their ids."""
    return {
        added.content: token
        for token, added in tokenizer.added_tokens_decoder.items()
        if len(added.content) > 1 and added.content in texts
    }


def _left_out(tokenizer: Any, tokens: Mapping[str, int]) -> dict[int, str]:
    """Return {id: text} of the special tokens among `tokens`. Decoding leaves special tokens out of the text."""
    added = tokenizer.added_tokens_decoder
    return {token: text for text, token in tokens.items() if added[token].special}


def sampling_of(asked: RequestFields, model: PreTrainedModel, max_new_tokens: int) -> Sampling:
    """Return the sampling settings of a request. Raises `ConfigError` for values out of bounds, and an `ApiError` for
    unknown token ids."""
    own = model.generation_config
    temperature, top_k = asked.temperature, None if asked.top_k is None else max(0, asked.top_k)
    narrows = asked.top_p not in (None, 1) or bool(top_k) or bool(asked.min_p)
    if asked.top_p == 0:
        temperature = 0.0  # no token but the most likely one
    elif temperature is None:
        temperature = (1.0 if own.temperature is None else own.temperature) if own.do_sample or narrows else 0.0
    penalties = asked.repetition_penalty, asked.repeat_penalty
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=_first(asked.top_p or None, own.top_p, 1.0),
        top_k=int(_first(top_k, own.top_k, 0)),
        min_p=own.min_p if asked.min_p is None else asked.min_p,
        repetition_penalty=1.0 if asked.repeat_last_n == 0 else _first(*penalties, own.repetition_penalty, 1.0),
        repetition_window=asked.repeat_last_n if (asked.repeat_last_n or 0) > 0 else None,
        ignores_end=bool(asked.ignore_eos),
        seed=secrets.randbelow(2**31) if asked.seed in (None, _ANY_SEED) else asked.seed,
    )
    if sampling.temperature is not None and sampling.temperature <= COLDEST:  # the likeliest token, of however many
        sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=None)
    if not isinstance(asked, Completing):
        return sampling
    return replace(
        sampling,
        stop=asked.stops,
        presence_penalty=_first(asked.presence_penalty, 0.0),
        frequency_penalty=_first(asked.frequency_penalty, 0.0),
        logit_bias=_biases(asked.logit_bias or {}, int(model.config.get_text_config().vocab_size)),
    )


def another(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling settings of the `number`-th text of a request: the same settings with another seed."""
    return replace(sampling, seed=(sampling.seed + number) % 2**63) if number else sampling


def texts_of(
    ids: Sequence[int],
    sampling: Sampling,
    count: int,
    logprobs: int | None,
    constraint: Copied | None,
    images: PromptImages | None = None,
) -> list[TextRequest]:
    """Return one request to the decode loop for each text of a prompt. Each has a copy of the constraint."""
    copies = [constraint if constraint is None or not number else constraint.another() for number in range(count)]
    return [TextRequest(ids, another(sampling, n), logprobs, each, images) for n, each in enumerate(copies)]


def refuse_endless(asked: RequestFields) -> None:
    """Raise an `ApiError` for a request that ignores the end token and has a grammar: its text could not end where the
    grammar ends."""
    if asked.ignore_eos:
        raise refused("'ignore_eos' must be false where a grammar constrains the response", "ignore_eos")


def _first(*values: float | None) -> float:
    """Return the first of the values that is not None."""
    return next(value for value in values if value is not None)


def _biases(given: dict[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    found = []
    for name, bias in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocabulary):
            raise refused(
                f"'logit_bias' names {name[:20]!r}; token ids are numbers from 0 to {vocabulary - 1}",
                "logit_bias",
                "invalid_value",
            )
        found.append((int(name), float(bias)))
    return tuple(found)
