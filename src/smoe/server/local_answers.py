"""Schemas of the responses of Ollama's and llama.cpp's APIs, for `/openapi.json` (see `answers.py`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from smoe.server.answers import ResponseModel, TokenLogprob


class OllamaRefusal(ResponseModel):
    """An error, in the form of Ollama's API."""

    error: str


class OllamaAnswer(ResponseModel):
    """A response of Ollama's API, or a line of its stream. The last fields are in the last line only."""

    model: str
    created_at: str
    logprobs: list[TokenLogprob] | None = None
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    """`load`: the request had no prompt, and the model is loaded."""
    total_duration: int | None = None
    """Nanoseconds, as for all durations."""
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    """Tokens of the prompt."""
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    """New tokens."""
    eval_duration: int | None = None


class OllamaFunction(ResponseModel):
    name: str
    arguments: dict[str, Any]


class OllamaCall(ResponseModel):
    id: str
    function: OllamaFunction


class OllamaMessage(ResponseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    """The model's reasoning before the answer."""
    tool_calls: list[OllamaCall] | None = Field(default=None, min_length=1)


class OllamaChat(OllamaAnswer):
    message: OllamaMessage


class OllamaGenerated(OllamaAnswer):
    response: str
    thinking: str | None = None


class OllamaDetails(ResponseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListed(ResponseModel):
    name: str
    model: str
    size: int
    """Bytes of the files with weights."""
    digest: str
    details: OllamaDetails
    modified_at: str | None = None
    expires_at: str | None = None
    size_vram: int | None = None
    """Bytes of the memory budget on a GPU; 0 if the model is computed by the CPU."""
    context_length: int | None = None


class OllamaModels(ResponseModel):
    models: list[OllamaListed]


class OllamaShown(ResponseModel):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking"]]
    modified_at: str


class OllamaVersion(ResponseModel):
    version: str
    """The version of Ollama's API that is followed."""
    smoe: str


class TokenPiece(ResponseModel):
    id: int
    piece: str | list[int]
    """The token's text; its bytes, if they are a part of a character."""


class Tokens(ResponseModel):
    tokens: list[int] | list[TokenPiece]


class TokensText(ResponseModel):
    content: str


class Properties(ResponseModel):
    """The server's properties, as llama.cpp has them."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    """The number of texts decoded together."""
    model_alias: str
    model_path: str
    """The model's name: paths of the machine are not shown."""
    modalities: dict[str, bool]
    chat_template: str
    build_info: str
