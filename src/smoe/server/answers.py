"""Schemas of the API's responses, for `/openapi.json`.

The server builds responses as plain dictionaries. Tests validate real responses with these models, which forbid other
fields.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ResponseModel(BaseModel):
    """The base of all schemas of responses."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


# -- errors -----------------------------------------------------------------------------------------------------------


class Problem(ResponseModel):
    """The details of an error."""

    message: str
    """A text for the user: the given value and the allowed values."""
    type: Literal["invalid_request_error", "permission_error", "rate_limit_error", "server_error"]
    param: str | None
    """The field that the error is about, such as `messages[0].role`."""
    code: str | None
    """The kind of error, for programs."""


class Refusal(ResponseModel):
    """The body of every error, in OpenAI's form."""

    error: Problem


# -- models, health ---------------------------------------------------------------------------------------------------


class Model(ResponseModel):
    """The model that is served."""

    id: str
    """The model's name, as requests give it."""
    object: Literal["model"]
    created: int
    """The start time of the server, in Unix time."""
    owned_by: Literal["smoe"]
    max_model_len: int
    """The maximum number of tokens of a prompt and its response together."""


class Models(ResponseModel):
    object: Literal["list"]
    data: list[Model]


class Health(ResponseModel):
    status: Literal["ok", "ending", "failed"]
    chat_template: Literal["failed"] | None = None
    """`failed`: the chat template exceeded its limits on the last conversation."""


# -- what completions have in common ----------------------------------------------------------------------------------


class CachedTokens(ResponseModel):
    cached_tokens: int
    """Prompt tokens reused from the KV cache."""


class ReasoningTokens(ResponseModel):
    reasoning_tokens: int
    """Generated tokens that are reasoning."""


class Usage(ResponseModel):
    """The numbers of tokens. A prompt counts once, however many texts are generated from it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None
    """Present if the model can write reasoning before its answer."""


class Completed(ResponseModel):
    """The common fields of all completions."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    """Identifies the version, the model and the settings that decide a response. Equal requests with equal fingerprints
    get equal responses."""


FinishReason = Literal["stop", "length", "tool_calls"]


# -- chat -------------------------------------------------------------------------------------------------------------


class LikelyToken(ResponseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(ResponseModel):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(ResponseModel):
    name: str
    arguments: str
    """The arguments as a JSON text."""


class Call(ResponseModel):
    """A call of a tool that the model requests."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    """The model's reasoning before the answer."""
    tool_calls: list[Call] = Field(default=[], min_length=1)


class ChatChoice(ResponseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Completed):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(ResponseModel):
    name: str = ""
    """Only in the first part of a call."""
    arguments: str


class CallDelta(ResponseModel):
    """A part of a call in a stream. The first part has the call's id and name; all parts together have its
    arguments."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(ResponseModel):
    """The text, reasoning or calls that a chunk adds to a choice."""

    role: Literal["assistant"] = "assistant"
    """Present in the first chunk of a choice."""
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[CallDelta] = Field(default=[], min_length=1)


class ChatChunkChoice(ResponseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Completed):
    """The data of one event of a stream; the last event's data is `[DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    """Present in the last chunk if `stream_options.include_usage` is true."""


# -- plain completions ------------------------------------------------------------------------------------------------


class TextLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(ResponseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Completed):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class TextChunkChoice(TextChoice):
    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class TextChunk(Completed):
    """The data of one event of a stream; the last event's data is `[DONE]`."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: Usage | None = None


# -- messages ---------------------------------------------------------------------------------------------------------


class MessageProblem(ResponseModel):
    type: str
    """The kind of error, by Anthropic's names for HTTP statuses."""
    message: str
    details: dict[str, Any] | None = None
    """For a request with `thread`: the code on which Anthropic's clients repeat the request without this field."""


class MessageRefusal(ResponseModel):
    """An error, in the form of Anthropic's API."""

    type: Literal["error"]
    error: MessageProblem


class MessageUsage(ResponseModel):
    """Token counts."""

    input_tokens: int
    """Tokens of the prompt that were not in the KV cache."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBlock(ResponseModel):
    """A part of a message: text, reasoning, or a call of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(ResponseModel):
    """The data of an event of a stream. Its type determines which other fields are present."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: MessageAnswer | None = None
    index: int | None = None
    content_block: MessageBlock | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None
    error: MessageProblem | None = None


class TokenCount(ResponseModel):
    input_tokens: int


class Deleted(ResponseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
