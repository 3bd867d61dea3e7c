"""The fields of requests to Anthropic's Messages API, by its names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from smoe.server.fields import MOST_MESSAGES, MOST_STOPS, Completing, Objects


class CountAsked(Completing):
    """A request to `POST /v1/messages/count_tokens`."""

    takes_any_model = True
    unsupported = {
        "container": (),
        "mcp_servers": ([],),
        "thread": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "logprobs": (False,),
        "max_output_tokens": (),
        "n": (1,),
        "parallel_tool_calls": (True,),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "stop": ([], ""),
        "top_logprobs": (0,),
    }
    instead: ClassVar = {
        "max_output_tokens": "max_tokens",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }
    names: ClassVar = {"prompt": "messages"}

    messages: Objects = Field(min_length=1, max_length=MOST_MESSAGES)
    """Turns of user, assistant and system: text, or blocks of text, thinking, tool_use and tool_result."""
    system: str | Objects | None = None
    """The system prompt: a text, or blocks of text."""
    stop_sequences: list[str] | None = Field(default=None, max_length=MOST_STOPS, fail_fast=True)
    """Strings at which the text ends."""
    tools: Objects | None = Field(default=None, max_length=128)
    """Tools with a `name` and an `input_schema`."""
    tool_choice: dict[str, Any] | None = None
    """`{"type": ...}`: auto, any, none, or tool with a `name`; `disable_parallel_tool_use`."""
    thinking: dict[str, Any] | None = None
    """`{"type": "disabled"}` turns reasoning off, other types on, where the chat template supports it. Reasoning ends
    after `budget_tokens`."""
    output_config: dict[str, Any] | None = None
    """Its `effort` is given to the chat template; its `format` is a JSON schema that the response matches."""
    output_format: dict[str, Any] | None = None
    """An earlier name of `output_config.format`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Not Anthropic's: given to the chat template."""
    container: Any = None
    mcp_servers: Any = None
    thread: Any = None
    # of OpenAI's API only
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    logprobs: Any = None
    max_output_tokens: Any = None
    n: Any = None
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    stop: Any = None
    top_logprobs: Any = None
    # ignored: the answer is right without them
    billing_policy: Any = None
    cache_control: Any = None
    compaction: Any = None
    context_management: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings at which the text ends."""
        return tuple(stop for stop in self.stop_sequences or () if stop)


class MessagesAsked(CountAsked):
    """A request to `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)] | Literal[-1]
    """The most tokens of the response; -1: as many as the context has room for."""
