"""What is asked of the API, field by field, as OpenAI names them.

A field that nobody knows is refused, as OpenAI refuses it. One that OpenAI knows is used, ignored where the answer is
right without it, or refused where it would not be (`check_unsupported`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from smoe.server.problem import refused

MOST_TEXTS = 128
"""Of one request."""
_MOST_STOPS = 16
_LONGEST_STOP = 256


class Asked(BaseModel):
    """What every kind of request has. `seed` and the rest are checked when a `Sampling` is made of them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that would change the answer in a way that we cannot, and the values that do not."""
    names: ClassVar[dict[str, str]] = {}
    """What our settings are called here."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Not OpenAI's: choose among so many tokens; 0: all."""
    repetition_penalty: float | None = None
    """Not OpenAI's: above 1, fewer repetitions."""
    seed: int | None = None
    stream: bool | None = None
    user: str | None = None

    def check_unsupported(self) -> None:
        """Refuse what would be answered wrongly."""
        for name, harmless in self.unsupported.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise refused(f"'{name}' is not supported by this server; leave it out", name, "unsupported_parameter")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


class Completing(Asked):
    """What chat and plain completions have in common."""

    n: int | None = Field(default=None, ge=1, le=MOST_TEXTS)
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Where the text ends. Raises an `ApiError` for too many, or for none that is text."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MOST_STOPS or any(len(stop) > _LONGEST_STOP for stop in stops):
            raise refused(f"'stop' may have {_MOST_STOPS} strings of {_LONGEST_STOP} characters at most", "stop")
        return tuple(stops)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionAsked(Completing):
    """`POST /v1/completions`."""

    unsupported = {"suffix": ("",), "echo": (False,), "best_of": (1,)}
    names: ClassVar = {"max_new_tokens": "max_tokens"}

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None


class Function(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: Function


class Message(BaseModel):
    """One of a conversation. What else clients keep in it is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    name: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


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

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """Given to the chat template, as `reasoning_effort`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Not OpenAI's: given to the chat template."""
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    moderation: Any = None
    web_search_options: Any = None
    # ignored: the answer is right without them
    metadata: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None


class ResponseText(BaseModel):
    """How a response is written."""

    model_config = ConfigDict(extra="ignore", strict=True)

    format: dict[str, Any] | None = None


class ResponseAsked(Asked):
    """`POST /v1/responses`."""

    unsupported = {
        "background": (False,),
        "conversation": (),
        "image": (),
        "moderation": (),
        "prompt": (),
        "truncation": ("disabled",),
        "context_management": ([],),
    }
    names: ClassVar = {"max_new_tokens": "max_output_tokens", "prompt": "input"}

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    text: ResponseText | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    reasoning: dict[str, Any] | None = None
    """Its `effort` is given to the chat template."""
    background: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    truncation: Any = None
    context_management: Any = None
    # ignored: the answer is right without them
    access_programs: Any = None
    background_options: Any = None
    include: Any = None
    max_tool_calls: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: Any = None
    top_logprobs: Any = None
