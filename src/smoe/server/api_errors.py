"""Errors in the API's form: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from smoe.config import SETTINGS
from smoe.errors import (
    CheckpointError,
    ConfigError,
    ContextError,
    EngineBusyError,
    EngineStateError,
    GenerationCancelledError,
    ImageError,
    ModelError,
    TransferError,
)

_log = logging.getLogger(__name__)
_SETTING = re.compile(r"`([a-z]+(?:_[a-z]+)*)`")
_RETRY_SECONDS = 2
_ANTHROPIC = {
    **dict.fromkeys((400, 405, 408, 415), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""{HTTP status: type of the error in Anthropic's API}."""

_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""What tells Anthropic's clients to send the whole conversation instead of a thread's new messages."""


class ApiError(Exception):
    """An error response. The client sees `message`: it contains no paths and no names of this machine."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def for_anthropic(self) -> dict[str, Any]:
        """The error's JSON body in the form of Anthropic's API."""
        more = {"details": _NO_THREADS} if self.param == "thread" else {}
        kind = _ANTHROPIC.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message, **more}}

    @property
    def for_ollama(self) -> dict[str, Any]:
        """The error's JSON body in the form of Ollama's API."""
        return {"error": self.message}

    def body_at(self, path: str) -> dict[str, Any]:
        """Return the error's JSON body in the form of the API to which the path belongs."""
        if path.startswith("/api/"):
            return self.for_ollama
        return self.for_anthropic if path.startswith("/v1/messages") else self.body

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response that depend on the error."""
        found = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return found if self.retry_after_seconds is None else found | {"Retry-After": str(self.retry_after_seconds)}


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error of status 400. `param`: the field that the error is about, for programs."""
    return ApiError(400, message, param=param, code="invalid_value" if code is None and param is not None else code)


def busy(why: str) -> ApiError:
    """Return an error of status 429: the server has no room for the request now. `why`: what is full."""
    message, seconds = f"the server is busy: {why}", _RETRY_SECONDS
    return ApiError(429, message, type="rate_limit_error", code="queue_full", retry_after_seconds=seconds)


def over() -> ApiError:
    """Return an error of status 503: the server is shutting down."""
    return ApiError(
        503,
        "the server is shutting down; try again when it is back",
        type="server_error",
        code="shutting_down",
        retry_after_seconds=5,
    )


def failed(why: Exception) -> ApiError:
    """Return an error of status 503: the model can no longer be used."""
    reason = "its files were changed after it was loaded" if isinstance(why, CheckpointError) else None
    message = f"the model can no longer be used: {reason or 'see the server log'}; start the server again"
    return ApiError(503, message, type="server_error", code="model_failed")


def problem_of(error: Exception, fields: Mapping[str, str], is_whole_context: bool = False) -> ApiError:
    """Convert an exception of the library to an error response. `fields`: {name of a library setting: its name in the
    request}; an error in any other setting is the server's fault. `is_whole_context`: whether the server already uses
    all of the model's positions."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return refused(
            _about_context(error, is_whole_context), fields.get("prompt", "prompt"), "context_length_exceeded"
        )
    if isinstance(error, ConfigError) and error.setting is not None and error.setting in fields:
        return refused(in_fields(str(error), fields), fields[error.setting], "invalid_value")
    if isinstance(error, ImageError):
        return refused(in_fields(str(error), fields), fields.get("prompt", "messages"), "invalid_image")
    if isinstance(error, EngineBusyError):
        return busy(str(error))
    if isinstance(error, (EngineStateError, GenerationCancelledError)):
        return over()
    if isinstance(error, CheckpointError):
        return failed(error)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, _of_ours(error), type="server_error", code=_code_of_ours(error))


def in_fields(message: str, fields: Mapping[str, str]) -> str:
    """Return an error message of the library in which names of settings are replaced by the request's field names, or
    by the server's options."""
    return _SETTING.sub(lambda found: _named(found[1], fields), message)


def _named(setting: str, fields: Mapping[str, str]) -> str:
    if setting in fields:
        return f"'{fields[setting]}'"
    option = SETTINGS[setting].option if setting in SETTINGS else ""
    return f"smoe serve {option}" if option else f"'{setting}'"


def _about_context(error: ContextError, is_whole: bool) -> str:
    """Return the message about a too long prompt, with the phrases by which clients of OpenAI's and Anthropic's APIs
    recognise it: some then shorten the conversation."""
    given = re.search(r"has ((?:about |more than )?\d+) tokens", str(error))
    tokens = f"prompt is too long: {given[1]} tokens > {error.given} maximum; " if given else ""
    more = "" if is_whole else ", or start the server by smoe serve --context with a larger number"
    return f"{tokens}this model's maximum context length is {error.given} tokens here; shorten the prompt{more}"


def _of_ours(error: Exception) -> str:
    if isinstance(error, TransferError):
        return "a part of the model could not be read from disk; this request failed, others continue"
    if isinstance(error, ModelError):
        return in_fields(str(error), {})
    return "the server failed; see its log"


def _code_of_ours(error: Exception) -> str:
    if isinstance(error, TransferError):
        return "read_error"
    return "model_error" if isinstance(error, ModelError) else "internal_error"
