"""The fields of requests, by OpenAI's names.

Unknown fields are ignored or refused (`body.py`). Fields of OpenAI's API that change nothing here are
ignored; fields that would change the response are refused (`check_unsupported`). Fields of other servers are accepted
with their neutral values only (`neutral_fields.py`). The bounds declared here appear in the API's description; checks
that need more than the request are elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field

from smoe.server.body import AskedFields
from smoe.server.neutral_fields import NEUTRAL, NeutralFields

MOST_TEXTS = 128
"""The maximum number of texts of one request."""
MOST_MESSAGES = 10_000
"""The maximum number of messages of one conversation. Validating so many takes some 20 ms, during which no other
request is answered."""
MOST_STOPS = 16
_LONGEST_STOP = 256
_MOST_BIASES = 1024
_HOTTEST = 2.0
"""The largest `temperature`, as in OpenAI's API."""

UP_TO_THE_CONTEXT = -1
"""As a number of new tokens: as many as the context has room for."""
Tokens = Annotated[int, Field(ge=1)] | Literal[-1] | None
Likeliest = Annotated[int | None, Field(ge=0, le=20)]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(max_length=_LONGEST_STOP)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Token = Annotated[int, Field(ge=0)]
Ids = Annotated[list[Token], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
"""A list of objects whose validation stops at the first invalid item: one error for each item of a long list would take
seconds and much memory."""


class RequestFields(AskedFields, NeutralFields):
    """The fields that all kinds of requests share."""

    model: str | None = None
    """The model's name, as `/v1/models` lists it. Left out: the model that is served."""
    temperature: float | None = Field(default=None, ge=0, le=_HOTTEST)
    """0: always the likeliest token. If this or a field below is left out, the model's own value applies."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """0: always the likeliest token."""
    top_k: int | None = Field(default=None, ge=-1)
    """Not OpenAI's: choose among this many of the likeliest tokens; 0 or -1: all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Not OpenAI's: choose among tokens that have at least this share of the likeliest token's probability; 0: all."""
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    """Not OpenAI's: values above 1 reduce repetition."""
    repeat_penalty: float | None = Field(default=None, ge=0.01, le=100)
    """The same, as llama.cpp and Ollama name it."""
    repeat_last_n: int | None = Field(default=None, ge=-1)
    """Not OpenAI's: the number of last tokens whose repetition is penalised; 0: none; -1 or left out: all."""
    ignore_eos: bool | None = None
    """Not OpenAI's: whether the model's end token is never chosen, so that the text ends at its other limits."""
    thinking_budget_tokens: int | None = Field(default=None, ge=-1)
    """Not OpenAI's: reasoning is ended after this many tokens; -1 or left out: it is not."""
    cache_prompt: bool | None = None
    """Accepted and ignored: what is reused from the KV cache changes no response."""
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    """Equal seeds draw equal texts. 64 bits; -1: as if left out."""
    stream: bool | None = None
    """Send events while the text is generated, instead of one response."""
    user: str | None = None
    """Accepted and ignored."""

    @classmethod
    def harmless(cls) -> dict[str, tuple[Any, ...]]:
        return NEUTRAL | cls.unsupported

    @property
    def asked_model(self) -> str | None:
        return None if self.takes_any_model else self.model


def first_given(*values: int | None) -> int | None:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    include_usage: bool | None = None
    """Whether a stream ends with the token counts."""


class GivenGrammar(BaseModel):
    """A grammar and its language."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["gbnf", "lark", "regex", "json"]
    value: str | dict[str, Any]
    """The grammar, or for `json` a JSON schema."""


class Completing(RequestFields):
    """The fields that chat and plain completions share."""

    n: int | None = Field(default=None, ge=1, le=MOST_TEXTS)
    """The number of texts for each prompt; the n-th draws with `seed` + n."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    """Strings at which a text ends; the string itself is not part of the text. Empty ones are ignored."""
    max_completion_tokens: Tokens = None
    """Overrides `max_tokens`. -1: as many as the context has room for, as without a number in a conversation."""
    max_tokens: Tokens = None
    """The same."""
    n_predict: Tokens = None
    """The same, as llama.cpp names it."""
    num_predict: Tokens = None
    """The same, as Ollama names it."""
    grammar: str | GivenGrammar | None = None
    """Not in OpenAI's API: a grammar that the response must match, as a text in GBNF or Lark, or as an object with the
    grammar's `type` and `value`."""
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: dict[str, Bias] | None = Field(default=None, max_length=_MOST_BIASES)
    """The value added to the logit of each token, by token id."""
    stream_options: StreamOptions | None = None

    @property
    def most_tokens(self) -> int | None:
        """The given maximum number of new tokens; None where none is given."""
        return first_given(self.max_completion_tokens, self.max_tokens, self.n_predict, self.num_predict)

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings at which the text ends, without empty ones."""
        return tuple(stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if stop)

    @property
    def settings(self) -> dict[str, str]:
        """The library's settings of this request; `max_new_tokens` has the name of whichever field is given."""
        given = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().settings | {"max_new_tokens": given}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=(), use_attribute_docstrings=True)

    name: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema that the response follows, enforced token by token."""


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=(), use_attribute_docstrings=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """Not OpenAI's: the schema, without a `json_schema` around it; also with `json_object`."""


class CompletionAsked(Completing):
    """A request to `POST /v1/completions`."""

    unsupported = {
        "add_generation_prompt": (True, False),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "max_output_tokens": (),
        "parallel_tool_calls": (True, False),
        "reasoning_effort": ("none",),
        "thinking_budget_tokens": (-1,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
    }
    instead: ClassVar = {"max_output_tokens": "max_tokens", "top_logprobs": "logprobs"}

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
        | Annotated[list[Token], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
    )
    """A text, several texts, the tokens of a text, or the tokens of several texts."""
    logprobs: Likeliest | Literal[False] = None
    """How many of the likeliest tokens to list for each token; false: no probabilities."""
    response_format: ResponseFormat | None = None
    # of conversations only
    add_generation_prompt: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    max_output_tokens: Any = None
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    thinking_budget_tokens: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None

    @property
    def likeliest(self) -> int | None:
        """`logprobs` as a number; None: no probabilities."""
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
    """A message of a conversation. Other fields that clients store in messages are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None


class GivenMessage(_Message):
    """A message of the system, the developer, the user or a tool."""

    role: Literal["system", "developer", "user", "tool"]
    content: str | Objects
    """A text, or its parts: `{"type": "text", "text": ...}`, and of the user `{"type": "image_url", ...}`."""


class AssistantMessage(_Message):
    """A message of the model: text, calls of tools, or both."""

    role: Literal["assistant"]
    content: str | Objects | None = None
    function_call: None = None
    """The old form of `tool_calls`, which is not supported."""


Message = Annotated[GivenMessage | AssistantMessage, Discriminator("role")]


class ChatAsked(Completing):
    """A request to `POST /v1/chat/completions`."""

    unsupported = {
        "audio": (),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "max_output_tokens": (),
        "modalities": (["text"],),
        "moderation": (),
        "web_search_options": (),
    }
    instead: ClassVar = {"functions": "tools", "function_call": "tool_choice", "max_output_tokens": "max_tokens"}
    names: ClassVar = {"prompt": "messages"}

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    logprobs: bool | Annotated[int, Field(ge=0, le=20)] | None = None
    """Whether to list the probability of each token; a number: as plain completions have it."""
    top_logprobs: Likeliest = None
    """How many of the likeliest tokens to list for each token; needs `logprobs`."""
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto`, `required`, or a function of `tools`."""
    parallel_tool_calls: bool | None = None
    """false: the response ends with its first call."""
    reasoning_effort: str | None = None
    """Passed to the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Not OpenAI's: variables for the chat template."""
    add_generation_prompt: bool | None = None
    """Not OpenAI's: whether the prompt ends with the beginning of a response. Left out: true, unless the last message
    is continued."""
    continue_final_message: bool | None = None
    """Not OpenAI's: continue the text of the last message, which must be an assistant's; the response contains what is
    added."""
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    max_output_tokens: Any = None
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
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to list for each token; None: no probabilities."""
        if isinstance(self.logprobs, bool):
            return (self.top_logprobs or 0) if self.logprobs else None
        return self.logprobs
