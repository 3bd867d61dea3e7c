"""Descriptions of the responses of `/v1/responses`, for the API's description (`openapi.py`) and for tests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from smoe.server.answers import CachedTokens, ReasoningTokens, ResponseModel


class OutputText(ResponseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[Any] = Field(max_length=0)


class OutputMessage(ResponseModel):
    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(ResponseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ResponseModel):
    """The model's reasoning."""

    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any] = Field(max_length=0)
    content: list[ReasoningText]


class OutputCall(ResponseModel):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    """The namespace of `tools` that has the function."""
    arguments: str
    """The arguments as a JSON text."""
    status: Literal["in_progress", "completed", "incomplete"]


class OutputCustomCall(ResponseModel):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    status: Literal["in_progress", "completed", "incomplete"]


class LocalShellAction(ResponseModel):
    type: Literal["exec"]
    command: list[str]
    """The program and its arguments; empty, with the status `incomplete`, if the model wrote no valid call."""
    env: dict[str, Any]
    working_directory: str | None = None
    timeout_ms: int | None = None


class OutputLocalShellCall(ResponseModel):
    """A call of the local shell. `id` and `call_id` are equal."""

    id: str
    type: Literal["local_shell_call"]
    call_id: str
    action: LocalShellAction
    status: Literal["in_progress", "completed", "incomplete"]


class ShellAction(ResponseModel):
    commands: list[str]
    """The commands; empty, with the status `incomplete`, if the model wrote no valid call."""
    timeout_ms: int | None
    max_output_length: int | None


class LocalEnvironment(ResponseModel):
    type: Literal["local"]


class OutputShellCall(ResponseModel):
    """A call of the shell."""

    id: str
    type: Literal["shell_call"]
    call_id: str
    action: ShellAction
    environment: LocalEnvironment
    status: Literal["in_progress", "completed", "incomplete"]


OutputItem = Annotated[
    OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputLocalShellCall | OutputShellCall,
    Field(discriminator="type"),
]


class ResponseCached(CachedTokens):
    cache_write_tokens: int


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: ResponseCached
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(ResponseModel):
    code: str | None
    message: str


class Incomplete(ResponseModel):
    reason: Literal["max_output_tokens"]


class TextForm(ResponseModel):
    format: dict[str, Any]


class ResponseAnswer(ResponseModel):
    """A response and the settings of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: TextForm
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(ResponseModel):
    """The data of one event of a stream; its type determines which of the other fields are present."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.shell_call_command.added",
        "response.shell_call_command.delta",
        "response.shell_call_command.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseAnswer | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    command: str | None = None
    command_index: int | None = None
    logprobs: list[Any] | None = Field(default=None, max_length=0)
