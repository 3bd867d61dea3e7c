"""What is asked of the API, field by field, as OpenAI names them.

An unknown field is refused, as OpenAI refuses it. One that OpenAI knows is used, ignored where the answer is
right without it, or refused where it would not be (`check_unsupported`). So are those of other servers, but for the
values that change nothing (`neutral_fields.py`). Bounds stand here for readers of the API's
description; what is no request's affair alone is checked where it is used.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field

from smoe.server.neutral_fields import NEUTRAL, NeutralFields
from smoe.server.problem import refused

MOST_TEXTS = 128
"""The most texts of one request."""
MOST_MESSAGES = 10_000
"""The most messages of one conversation: to validate so many takes some 20 ms, in which the server answers no other
request."""
_MOST_STOPS = 16
_LONGEST_STOP = 256
_MOST_BIASES = 1024
_HOTTEST = 2.0
"""OpenAI's limit."""

Tokens = Annotated[int | None, Field(ge=1)]
Likeliest = Annotated[int | None, Field(ge=0, le=20)]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Token = Annotated[int, Field(ge=0)]
Ids = Annotated[list[Token], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
"""A list ends at its first wrong item: an error of every item of a long one would take seconds and memory."""


def _tell_unsupported(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Describe in a schema the values that unsupported fields may have."""
    for name, harmless in (NEUTRAL | getattr(kind, "unsupported", {})).items():
        schema["properties"][name] = {
            "enum": [None, *harmless],
            "default": None,
            "description": "Not supported: leave it out.",
        }


class RequestFields(NeutralFields):
    """What every kind of request has."""

    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, json_schema_extra=_tell_unsupported
    )
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that would change the answer in a way that we cannot, and the values that do not."""
    names: ClassVar[dict[str, str]] = {}
    """What our settings are called here."""

    model: str
    """The model's name: /v1/models."""
    temperature: float | None = Field(default=None, ge=0, le=_HOTTEST)
    """0: the likeliest token. Left out: the model's own value, as for all fields below."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """0: the likeliest token."""
    top_k: int | None = Field(default=None, ge=-1)
    """Not OpenAI's: choose among this many of the likeliest tokens; 0 or -1: all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Not OpenAI's: choose among tokens that have at least this share of the likeliest one's probability; 0: all."""
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    """Not OpenAI's: above 1, fewer repetitions."""
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    """The same seed draws the same text again. 64 bits; -1: as if left out."""
    stream: bool | None = None
    """Send events while the text is generated, instead of one response."""
    user: str | None = None
    """Ignored."""

    def check_unsupported(self) -> None:
        """Refuse what would be answered wrongly."""
        for name, harmless in (NEUTRAL | self.unsupported).items():
            value = getattr(self, name)
            if value is not None and not any(_is_same(value, each) for each in harmless):
                only = "".join(f", or give {json.dumps(each)}" for each in harmless)
                message = f"'{name}' is not supported by this server; leave it out{only}"
                raise refused(message, name, "unsupported_parameter")

    @property
    def settings(self) -> dict[str, str]:
        """What the library's settings are called in this request: those alone that it has."""
        return {name: name for name in type(self).model_fields} | self.names


def _is_same(value: Any, other: Any) -> bool:
    """Equality as in JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    include_usage: bool | None = None
    """Whether a stream ends with the numbers of tokens."""


class Completing(RequestFields):
    """What chat and plain completions have in common."""

    n: int | None = Field(default=None, ge=1, le=MOST_TEXTS)
    """Texts for each prompt; the n-th draws with `seed` + n."""
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS, fail_fast=True)] | None = None
    """Strings at which a text ends; the string itself is not part of the text."""
    max_tokens: Tokens = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: dict[str, Bias] | None = Field(default=None, max_length=_MOST_BIASES)
    """Token numbers, and the value added to the logit of each."""
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Where the text ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionAsked(Completing):
    """`POST /v1/completions`."""

    names: ClassVar = {"max_new_tokens": "max_tokens"}

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
        | Annotated[list[Token], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
    )
    """A text, several texts, the tokens of a text, or those of several."""
    logprobs: Likeliest | Literal[False] = None
    """How many of the likeliest tokens to list for each token; false: no probabilities."""

    @property
    def likeliest(self) -> int | None:
        """`logprobs`; None for no probabilities."""
        return None if self.logprobs is False else self.logprobs


class Function(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: Function


class _Message(BaseModel):
    """One of a conversation. What else clients keep in it is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None


class GivenMessage(_Message):
    """A message that is not the model's."""

    role: Literal["system", "developer", "user", "tool", "function"]
    content: str | Objects
    """A text, or its parts: `{"type": "text", "text": ...}`."""


class AssistantMessage(_Message):
    """A message of the model: text, calls of tools, or both."""

    role: Literal["assistant"]
    content: str | Objects | None = None


Message = Annotated[GivenMessage | AssistantMessage, Discriminator("role")]


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=(), use_attribute_docstrings=True)

    name: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema that the response follows, enforced token by token."""


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatAsked(Completing):
    """`POST /v1/chat/completions`."""

    unsupported = {
        "audio": (),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "moderation": (),
        "web_search_options": (),
    }
    names: ClassVar = {"max_new_tokens": "max_completion_tokens", "prompt": "messages"}

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: Tokens = None
    """Overrides `max_tokens`. Without both: as many as the context has room for."""
    logprobs: bool | None = None
    top_logprobs: Likeliest = None
    """Needs `logprobs`."""
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto`, `required`, or a function of `tools`."""
    parallel_tool_calls: bool | None = None
    """false: the response ends with its first call."""
    reasoning_effort: str | None = None
    """Given to the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Not OpenAI's: given to the chat template."""
    add_generation_prompt: bool | None = None
    """Not OpenAI's: whether the prompt ends with the beginning of an answer; left out: unless the last message is
    continued."""
    continue_final_message: bool | None = None
    """Not OpenAI's: go on with the text of the last message, which is an assistant's, and answer with what is added."""
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    moderation: Any = None
    web_search_options: Any = None
    # ignored: the answer is right without them
    metadata: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None

    @property
    def settings(self) -> dict[str, str]:
        """`max_new_tokens` by the name that this request gives it."""
        found = super().settings
        return found | ({"max_new_tokens": "max_tokens"} if self.max_completion_tokens is None else {})


class ResponseText(BaseModel):
    """How a response is written."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    format: dict[str, Any] | None = None
    """`{"type": "text"}`, `json_object`, or `json_schema` with a `schema`."""


class ResponseAsked(RequestFields):
    """`POST /v1/responses`."""

    unsupported = {
        "background": (False,),
        "conversation": (),
        "image": (),
        "moderation": (),
        "prompt": (),
        "truncation": ("disabled",),
        "context_management": ([],),
        "n": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "logprobs": (False,),
    }
    names: ClassVar = {"max_new_tokens": "max_output_tokens", "prompt": "input"}

    input: str | Objects
    """A text, or the items of a conversation: messages, function calls and their results."""
    instructions: str | None = None
    """For this response only."""
    max_output_tokens: Tokens = None
    """Left out: as many as the context has room for."""
    previous_response_id: str | None = None
    """A stored response whose conversation is continued."""
    store: bool | None = None
    """Whether the response is stored, so that later ones can continue it; left out: yes."""
    text: ResponseText | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128, fail_fast=True)
    """Functions only."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """false: the response ends with its first call."""
    metadata: dict[str, str] | None = None
    """Returned in the response."""
    reasoning: dict[str, Any] | None = None
    """Its `effort` is given to the chat template."""
    background: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    truncation: Any = None
    context_management: Any = None
    n: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    # ignored: the answer is right without them
    access_programs: Any = None
    background_options: Any = None
    include: Any = None
    max_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: Any = None
    top_logprobs: Any = None
