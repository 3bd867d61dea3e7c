"""The fields of requests to Ollama's API, by its names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from smoe.server.body import AskedFields
from smoe.server.fields import MOST_MESSAGES, UP_TO_THE_CONTEXT, Likeliest, Objects

_FILL_CONTEXT = -2
"""The value of `num_predict` that means: until the context is full. -1, no limit, has the same meaning here, because a
text cannot leave its context."""


class LoadingOptions(BaseModel):
    """Options that are ignored: the server has loaded the model, with its context, before any request."""

    model_config = ConfigDict(extra="ignore", strict=True)

    embedding_only: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    low_vram: Any = None
    main_gpu: Any = None
    num_batch: Any = None
    num_ctx: Any = None
    num_gpu: Any = None
    num_keep: Any = None
    num_thread: Any = None
    numa: Any = None
    penalize_newline: Any = None
    use_mlock: Any = None
    use_mmap: Any = None
    vocab_only: Any = None


class OllamaOptions(LoadingOptions):
    """How a text is generated. Types and bounds are those of the fields of chat completions, except of `num_predict`,
    which has one more value."""

    frequency_penalty: Any = None
    min_p: Any = None
    mirostat: Any = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None
    num_predict: Annotated[int, Field(ge=1)] | Literal[-1, -2] | None = None
    presence_penalty: Any = None
    repeat_last_n: Any = None
    repeat_penalty: Any = None
    seed: Any = None
    stop: Any = None
    temperature: Any = None
    tfs_z: Any = None
    top_k: Any = None
    top_p: Any = None
    typical_p: Any = None

    def sampling(self) -> dict[str, Any]:
        """Return the options that decide which tokens are chosen, as fields of chat completions."""
        given = self.model_dump(exclude_none=True, exclude=set(LoadingOptions.model_fields))
        return given | ({"num_predict": UP_TO_THE_CONTEXT} if self.num_predict == _FILL_CONTEXT else {})


class OllamaAsked(AskedFields):
    """The fields of all requests to Ollama's API that name a model."""

    tags = ("", ":latest")

    model: str | None = None
    """The model's name, as `/api/tags` lists it. Left out: the model that is served."""
    keep_alive: Any = None
    """Accepted and ignored: the model stays loaded until the server ends."""

    @property
    def asked_model(self) -> str | None:
        return self.model


class OllamaGenerating(OllamaAsked):
    """The fields that chat and generate share."""

    stream: bool | None = None
    """Send lines while the text is generated, instead of one response. Left out: true."""
    format: Literal["", "json"] | dict[str, Any] | None = None
    """`json`, or a JSON schema that the response matches."""
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    """Turns reasoning on or off, where the chat template supports it; a text is the reasoning effort."""
    logprobs: bool | None = None
    top_logprobs: Likeliest = None


class OllamaChatAsked(OllamaGenerating):
    """A request to `POST /api/chat`."""

    names: ClassVar = {"max_new_tokens": "num_predict", "prompt": "messages"}

    messages: Annotated[Objects, Field(max_length=MOST_MESSAGES)] | None = None
    """The conversation; empty: only whether the model is loaded."""
    tools: Objects | None = Field(default=None, max_length=128)


class OllamaGenerateAsked(OllamaGenerating):
    """A request to `POST /api/generate`."""

    unsupported = {
        "context": ([],),
        "height": (0,),
        "steps": (0,),
        "suffix": ("",),
        "template": ("",),
        "tools": ([],),
        "width": (0,),
    }
    names: ClassVar = {"max_new_tokens": "num_predict", "prompt": "prompt"}

    prompt: str | None = None
    """The message of the user, or with `raw` the text to continue; empty: only whether the model is loaded."""
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt is continued without a chat template."""
    images: list[str] | None = None
    """Image files in base64, for models that were loaded with their image encoder."""
    context: Any = None
    height: Any = None
    steps: Any = None
    suffix: Any = None
    template: Any = None
    tools: Any = None
    width: Any = None


class OllamaShowAsked(AskedFields):
    """A request to `POST /api/show`."""

    tags = OllamaAsked.tags

    model: str | None = None
    name: str | None = None
    """An earlier name of `model`."""
    verbose: bool | None = None
    """Accepted and ignored."""

    @property
    def asked_model(self) -> str | None:
        return self.model or self.name
