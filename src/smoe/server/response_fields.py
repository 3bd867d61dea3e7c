"""The fields of requests to `/v1/responses`."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from smoe.server.fields import GivenGrammar, Objects, RequestFields, Tokens

HOSTED_TOOLS = frozenset(
    (
        "code_interpreter",
        "file_search",
        "image_generation",
        "mcp",
        "programmatic_tool_calling",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    )
)
"""Types of tools that OpenAI's servers run themselves. A model that does not get them answers without."""


class ResponseText(BaseModel):
    """The format that a response's text must have."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    format: dict[str, Any] | None = None
    """`{"type": "text"}`, `json_object`, or `json_schema` with a `schema`."""


class ResponseAsked(RequestFields):
    """A request to `POST /v1/responses`."""

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
        "top_logprobs": (0,),
        "stop": ([], ""),
        "response_format": ({"type": "text"},),
        "reasoning_effort": (),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
        "max_completion_tokens": (),
        "max_tokens": (),
        "n_predict": (),
        "num_predict": (),
    }
    instead: ClassVar = {
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        **dict.fromkeys(("max_completion_tokens", "max_tokens", "n_predict", "num_predict"), "max_output_tokens"),
    }
    names: ClassVar = {"max_new_tokens": "max_output_tokens", "prompt": "input"}

    input: str | Objects
    """A text, or the items of a conversation: messages, calls of tools and their results."""
    instructions: str | None = None
    """The system message of this response; it is not stored."""
    max_output_tokens: Tokens = None
    """The most new tokens. Left out: as many as the context has room for."""
    previous_response_id: str | None = None
    """The stored response whose conversation is continued."""
    store: bool | None = None
    """Whether the response is stored, so that later requests can continue it; left out: true."""
    text: ResponseText | None = None
    grammar: str | GivenGrammar | None = None
    """Not in OpenAI's API: a grammar that the response must match, as a text in GBNF or Lark, or as an object with the
    grammar's `type` and `value`."""
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128, fail_fast=True)
    """Functions, custom tools, namespaces of both, and the types local_shell and shell. Tools of OpenAI's servers are
    ignored."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """false: the response ends with its first call."""
    metadata: dict[str, str] | None = None
    """Returned unchanged in the response."""
    reasoning: dict[str, Any] | None = None
    """Its `effort` is passed to the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Not OpenAI's: variables for the chat template."""
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
    top_logprobs: Any = None
    stop: Any = None
    response_format: Any = None
    reasoning_effort: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    max_completion_tokens: Any = None
    max_tokens: Any = None
    n_predict: Any = None
    num_predict: Any = None
    # ignored: the answer is right without them
    access_programs: Any = None
    background_options: Any = None
    client_metadata: Any = None
    include: Any = None
    max_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: Any = None

    @property
    def ignored_parts(self) -> dict[str, str]:
        tools = [(number, tool.get("type")) for number, tool in enumerate(self.tools or ())]
        return {f"tools[{number}]": f"the tool {kind}" for number, kind in tools if kind in HOSTED_TOOLS}
