"""Unknown fields of requests: they are ignored and named in a response header and in the log, or refused by a strict
server."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, get_args, get_origin
from urllib.parse import quote

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from smoe.server.field_errors import shortened
from smoe.server.problem import ApiError, refused

_log = logging.getLogger(__name__)
IGNORED_FIELDS = "x-smoe-ignored-fields"
"""The response header that lists ignored fields."""
_MOST_LISTED = 20
"""The maximum number of field names in the response header."""
_MOST_LOGGED = 200
"""The maximum number of different unknown field names that get a line in the log, because a client may send any
names."""


class UnknownField(NamedTuple):
    """A field of a request, or of an object in a request, that the API does not have."""

    inside: str
    """The path of the object that has the field, such as `stream_options.`; empty for the request itself."""
    name: str
    kind: type[BaseModel]
    """The model class whose fields are known in this object."""

    @property
    def shown(self) -> str:
        return self.inside + shortened(self.name)

    @property
    def hint(self) -> str:
        """A question that names the known field with the most similar name; empty if no name is similar."""
        known = [field.alias or name for name, field in self.kind.model_fields.items()]
        near = get_close_matches(shortened(self.name).lower(), known, 1)
        return f" (did you mean {self.inside}{near[0]}?)" if near else ""


def unknown_fields(kind: type[BaseModel], value: Any, inside: str = "") -> Iterator[UnknownField]:
    """Yield the fields in `value` that a request of this kind does not have. Items of lists (messages, tools) are not
    searched."""
    if not isinstance(value, dict):
        return
    known = {field.alias or name: field for name, field in kind.model_fields.items()}
    for name, inner in value.items():
        if name not in known:
            yield UnknownField(inside, name, kind)
        for part in _kinds(known[name].annotation) if name in known else ():
            yield from unknown_fields(part, inner, f"{inside}{name}.")


class UnknownFields:
    """The unknown fields of one server's requests. One thread at a time calls `check`."""

    def __init__(self, is_strict: bool) -> None:
        """`is_strict`: whether unknown fields are refused."""
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def check(self, kind: type[BaseModel], value: Any) -> list[str]:
        """Return the names of the unknown fields of a body, and log each name once. A strict server raises an
        `ApiError` for the first unknown field."""
        found = list(unknown_fields(kind, value))
        if found and self._is_strict:
            raise _refused(found[0])
        for field in found:
            if field.shown not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(field.shown)
                _log.info("the unknown field %r of a request is ignored%s", field.shown, field.hint)
        return [field.shown for field in found]


def list_ignored(request: Request, names: Sequence[str]) -> None:
    """Store the names of a request's ignored fields, for a header of its response."""
    request.state.ignored_fields = names


def add_post(app: FastAPI, path: str, respond: Callable[[Request], Awaitable[Response]]) -> None:
    """Add a path whose responses name the request's ignored fields in a header."""

    @app.post(path)
    async def answered(request: Request) -> Response:
        response = await respond(request)
        _add_ignored(request, response)
        return response


def _add_ignored(request: Request, response: Response) -> None:
    """Add the header that lists the request's ignored fields, if there are any."""
    names = getattr(request.state, "ignored_fields", ())
    if names:
        more = [f"and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
        response.headers[IGNORED_FIELDS] = ",".join(quote(name, safe=" []") for name in [*names[:_MOST_LISTED], *more])


def _refused(field: UnknownField) -> ApiError:
    message = f"Unrecognized request argument supplied: {field.shown}{field.hint}; this server is strict"
    return refused(message, field.shown, "unknown_parameter")


def _kinds(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the model classes by which a field's value may be validated, apart from those of a list's items."""
    for each in get_args(annotation) or (annotation,):
        if get_origin(each) is None and isinstance(each, type) and issubclass(each, BaseModel):
            yield each
