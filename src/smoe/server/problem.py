"""What has gone wrong, in the API's own shape: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from smoe.errors import (
    CheckpointError,
    ConfigError,
    ContextError,
    EngineBusyError,
    EngineStateError,
    GenerationCancelledError,
    ModelError,
    TransferError,
)

_log = logging.getLogger(__name__)
_SETTING = re.compile(r"`([a-z]+(?:_[a-z]+)*)`")
_RETRY_SECONDS = 2


class ApiError(Exception):
    """Why a request gets no answer. `message` is shown to the client: no path, no name of this machine."""

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
        """The answer's JSON."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_seconds is None else {"Retry-After": str(self.retry_after_seconds)}


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """What was asked cannot be done: status 400. A named field is in `param` for programs."""
    return ApiError(400, message, param=param, code="invalid_value" if code is None and param is not None else code)


def busy(why: str) -> ApiError:
    """There is no room now: status 429."""
    message, seconds = f"the server is busy: {why}", _RETRY_SECONDS
    return ApiError(429, message, type="rate_limit_error", code="queue_full", retry_after_seconds=seconds)


def over() -> ApiError:
    """The server ends: status 503."""
    return ApiError(
        503,
        "the server is shutting down; try again when it is back",
        type="server_error",
        code="shutting_down",
        retry_after_seconds=5,
    )


def failed(why: Exception) -> ApiError:
    """No request can be answered any more: status 503."""
    reason = "its files were changed after it was loaded" if isinstance(why, CheckpointError) else None
    message = f"the model can no longer be used: {reason or 'see the server log'}; start the server again"
    return ApiError(503, message, type="server_error", code="model_failed")


def problem_of(error: Exception, fields: Mapping[str, str], is_whole_context: bool = False) -> ApiError:
    """An error of the library, as a client gets it. `fields`: what settings are called in its request; one that is not
    there is the server's own affair. `is_whole_context`: the model has no more positions than it is served with."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return refused(
            _about_context(error, is_whole_context), fields.get("prompt", "prompt"), "context_length_exceeded"
        )
    if isinstance(error, ConfigError) and error.setting is not None and error.setting in fields:
        return refused(in_fields(str(error), fields), fields[error.setting], "invalid_value")
    if isinstance(error, EngineBusyError):
        return busy(str(error))
    if isinstance(error, (EngineStateError, GenerationCancelledError)):
        return over()
    if isinstance(error, CheckpointError):
        return failed(error)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, _of_ours(error), type="server_error", code=_code_of_ours(error))


def in_fields(message: str, fields: Mapping[str, str]) -> str:
    """A message of the library with the request's fields in the place of its settings."""
    return _SETTING.sub(lambda found: f"'{fields.get(found[1], found[1])}'", message)


def _about_context(error: ContextError, is_whole: bool) -> str:
    """The message in the words that clients look for."""
    given = re.search(r"has (\d+) tokens", str(error))
    tokens = f", and the prompt has {given[1] if given else 'many more'}"
    more = "" if is_whole else ", or start the server with a longer context"
    return f"this model's maximum context length is {error.given} tokens here{tokens}; shorten the prompt{more}"


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
