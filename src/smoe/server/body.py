"""Parsing of request bodies: from bytes to validated fields.

A body is one JSON object in UTF-8, uncompressed. Repeated keys, NaN, Infinity, numbers too large for any field, lone
surrogates and deep nesting are refused here, so that later code need not check for them.

The values of a body are counted in its bytes before it is parsed. A C parser holds Python's global lock while it works,
and so does validation: a million small lists in 4 MiB would block the server for two seconds.

Unknown fields of requests are ignored and named in a response header and in a warning, or refused by a strict server.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from smoe.server.api_errors import ApiError, refused
from smoe.server.events import ClientGoneError
from smoe.server.field_errors import refusal_of, shortened

_log = logging.getLogger(__name__)
MOST_CONTAINERS = 50_000
"""The maximum number of objects and lists of a body; parsing and validating them takes about 30 ms each."""
MOST_VALUES = 500_000
"""The maximum number of values of a body, such as the tokens of a prompt."""
MOST_FIELDS = 4096
"""The largest number of fields of one object. Validation makes an error object for every wrong field, so more would
take too long."""
_CHUNK_BYTES = 1 << 16
_BRACES = re.compile(rb"[{}]")
_MOST_WARNINGS = 200
"""The maximum number of warnings about ignored fields, because a client may send any names."""
_DEEPEST = 100
"""The deepest nesting of objects and lists: later code processes them recursively."""
_MOST_DIGITS = 100
_EXACT = 2.0**53
"""Whole numbers below this bound are exact as floats."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def _alternative(name: str | None, words: str) -> str:
    """Return `words` with the name of the field to use instead; empty if there is none."""
    return "" if name is None else words.format(f"'{name}'")


def _tell_unsupported(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Add to a JSON schema, for each field without effect in this server, the only values that requests may give: those
    that change nothing."""
    if not issubclass(kind, AskedFields):
        return
    for name, harmless in kind.harmless().items():
        schema["properties"][name] = {
            "enum": [None, *harmless],
            "default": None,
            "description": "Not supported: leave it out." + _alternative(kind.instead.get(name), " Use {}."),
        }


class AskedFields(BaseModel):
    """The base of the fields of all requests."""

    model_config = ConfigDict(
        extra="ignore", strict=True, use_attribute_docstrings=True, json_schema_extra=_tell_unsupported
    )
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that would change the response but are not supported, with the values that change nothing."""
    instead: ClassVar[dict[str, str]] = {}
    """{field that is not supported: the field of this kind of request that has the same effect}."""
    names: ClassVar[dict[str, str]] = {}
    """{name of a library setting: its name in this kind of request}, where the two names differ."""
    takes_any_model: ClassVar[bool] = False
    """Whether `model` may be any name: agents send the names of their maker's models."""
    tags: ClassVar[tuple[str, ...]] = ("",)
    """The suffixes that may follow the model's name in a request, such as a tag."""

    @classmethod
    def harmless(cls) -> dict[str, tuple[Any, ...]]:
        """Return the fields that are not supported, with the values that change nothing."""
        return cls.unsupported

    @property
    def asked_model(self) -> str | None:
        """The name of the model that the request is for; None: the model that is served."""
        return None

    @property
    def ignored_parts(self) -> dict[str, str]:
        """{place: what is there} of the request's parts that are known but ignored, such as tools that only other
        servers have. A strict server refuses them, as it does unknown fields."""
        return {}

    def check_unsupported(self) -> None:
        """Raise an `ApiError` for a field whose value would change the response but is not supported."""
        for name, harmless in self.harmless().items():
            value = getattr(self, name)
            if value is not None and not any(_is_same(value, each) for each in harmless):
                only = "".join(f", or give {json.dumps(each)}" for each in harmless)
                use = _alternative(self.instead.get(name), "; use {}")
                message = f"'{name}' is not supported in this request; leave it out{only}{use}"
                raise refused(message, name, "unsupported_parameter")

    @property
    def settings(self) -> dict[str, str]:
        """{name of a library setting that this request sets: its name in the request}."""
        return {name: name for name in type(self).model_fields} | self.names


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


_T = TypeVar("_T", bound=AskedFields)


async def body_of(request: Request) -> bytes:
    """Return the bytes of a request's body; the request itself has no copy of them.

    Raises an `ApiError` for an unsupported content type, and `ClientGoneError` if the client disconnects.
    """
    if not request.scope["path"].startswith("/api/"):  # clients of Ollama's API send JSON as any type
        _check_form(request.headers)
    try:
        return b"".join([part async for part in request.stream()])
    except ClientDisconnect:
        raise ClientGoneError from None


def asked_of(kind: type[_T], data: bytes, unknown: UnknownFields) -> tuple[_T, list[str]]:
    """Return the validated fields of a request body. Raises an `ApiError` for an invalid body.

    Validation may take long: do not call this function on the event loop's thread.
    """
    value = _value_of(data)
    names = unknown.check(kind, value)
    return fields_of(kind, value), names


def fields_of(kind: type[_T], value: Any) -> _T:
    """Return the validated fields of a request body that was parsed as JSON. Raises an `ApiError` for an invalid
    body."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problem = refusal_of(kind, error, value)
    raise problem  # outside of the `except`: the error would keep the body's values in memory


def _check_form(headers: Headers) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        message = (
            f"compressed bodies are not supported ('Content-Encoding: {encoding[:40]}'); send the body uncompressed"
        )
        raise ApiError(415, message, code="unsupported_content_encoding")
    given, _, more = headers.get("content-type", "").partition(";")
    kind = given.strip().lower()
    charset = re.search(r"charset\s*=\s*\"?([^\s\";]+)", more.lower())
    if not (kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))):
        what = f"it has the type {given.strip()[:60]!r}" if kind else "it has no 'Content-Type'"
        message = f"the body must be a JSON object, sent with 'Content-Type: application/json'; {what}"
        raise ApiError(415, message, code="unsupported_media_type")
    if charset is not None and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        message = f"the body must be JSON in UTF-8; its 'Content-Type' has the charset {charset[1][:40]!r}"
        raise ApiError(415, message, code="unsupported_media_type")


def _value_of(data: bytes) -> Any:
    """Return the JSON value of a request body. Raises an `ApiError` for a body that is not valid JSON."""
    data = data.removeprefix(codecs.BOM_UTF8)
    if not data or data.isspace():
        raise refused("the body is empty; it must be a JSON object")
    check_size(data)
    try:
        text = data.decode("utf8")
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise refused(f"the body is not JSON: it is not UTF-8 ({why})") from error
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_whole, parse_float=_number, parse_constant=_no_number
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise refused(f"the body is not JSON: {error.msg} ({where})") from error
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    if _HALF.search(text):
        _check_characters(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = _first_repeated(name for name, _ in pairs)
        raise refused(f"the body has {shortened(twice)!r} twice in one object; leave one of them out")
    if len(found) > MOST_FIELDS:
        raise too_many_fields()
    return found


def _first_repeated(names: Iterable[str]) -> str:
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError("no name is there twice")


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise refused(f"the body has a number of {len(digits)} digits; at most {_MOST_DIGITS} are allowed")
    return int(digits)


def _number(digits: str) -> float:
    """Return a parsed JSON number. A whole number such as 2.0 becomes an int: JSON schemas count it as an integer, so
    integer fields must accept it."""
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise refused(f"the body has {shortened(digits)}, which is too large for a floating-point number")
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def _no_number(name: str) -> NoReturn:
    raise refused(f"the body is not JSON: {name} is not a JSON number")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        inner = (each for one in level if isinstance(one, (dict, list)) for each in _inside(one))
        level = [each for each in inner if isinstance(each, (dict, list))]
        if depth > _DEEPEST:
            raise _too_deep()


def _inside(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def _too_deep() -> ApiError:
    return refused(f"the body has more than {_DEEPEST} levels of nested objects and lists; nest them less")


def _check_characters(value: Any) -> None:
    """Raise an `ApiError` for a lone surrogate: JSON can express one, but it is not valid text."""
    parts = value.items() if isinstance(value, dict) else [(None, value)]
    for name, part in parts:
        try:
            json.dumps([name, part], ensure_ascii=False).encode("utf8")
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            message = f"the body has half a character (a lone surrogate, {half}), which is not valid text"
            raise refused(message, None if name is None else shortened(name)) from error


def check_size(data: bytes) -> None:
    """Raise an `ApiError` for a body with too many values, objects or lists. The check takes linear time and works in
    short steps."""
    if _is_small(_containers(data), data.count(b",")) and data.count(b":") <= MOST_FIELDS:
        return
    containers = commas = fields = 0
    text = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # from here on every quotation mark begins or ends a string
    is_inside = False
    for begin in range(0, len(text), _CHUNK_BYTES):
        parts = text[begin : begin + _CHUNK_BYTES].split(b'"')
        outside = b"".join(parts[1::2] if is_inside else parts[::2])
        is_inside ^= len(parts) % 2 == 0
        containers += _containers(outside)
        commas += outside.count(b",")
        if not _is_small(containers, commas):
            raise refused(
                f"the body has more than {MOST_CONTAINERS} objects and lists, or more than {MOST_VALUES} values; "
                "send fewer"
            )
        fields = _fields_in_a_row(fields, outside)


def _fields_in_a_row(before: int, outside: bytes) -> int:
    """Return the number of fields since the last brace, which bounds the number of fields of one object. `before`: the
    number before these bytes; `outside`: the bytes outside of strings. Raises an `ApiError` if the number is too
    large."""
    fields = before
    for number, part in enumerate(_BRACES.split(outside)):
        fields = part.count(b":") + (0 if number else fields)
        if fields > MOST_FIELDS:
            raise too_many_fields()
    return fields


def too_many_fields() -> ApiError:
    return refused(f"the body has an object of more than {MOST_FIELDS} fields; send fewer")


def _containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _is_small(containers: int, commas: int) -> bool:
    return containers <= MOST_CONTAINERS and commas < MOST_VALUES


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
    """The unknown fields of one server's requests. One thread at a time calls `check` and `warn_of`."""

    def __init__(self, is_strict: bool, warn: Callable[[str], None] = _log.warning) -> None:
        """`is_strict`: whether unknown fields are refused. `warn` prints for the user who started the server."""
        self._is_strict, self._warn = is_strict, warn
        self._warned: set[str] = set()

    def check(self, kind: type[BaseModel], value: Any) -> list[str]:
        """Return the names of the unknown fields of a body, and warn of each name once. A strict server raises an
        `ApiError` for the first unknown field."""
        found = list(unknown_fields(kind, value))
        if found and self._is_strict:
            raise _refused_field(found[0])
        for field in found:
            self.warn_of(f"the unknown field {field.shown!r}", field.hint)
        return [field.shown for field in found]

    def warn_of(self, what: str, hint: str = "") -> None:
        """Warn once that a part of a request is ignored. Most programs show their user no header of a response."""
        if what not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(what)
            self._warn(f"{what} of a request is ignored{hint}; further requests with it get no warning")


def _refused_field(field: UnknownField) -> ApiError:
    message = f"Unrecognized request argument supplied: {field.shown}{field.hint}; this server is strict"
    return refused(message, field.shown, "unknown_parameter")


def _kinds(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the model classes by which a field's value may be validated, apart from those of a list's items."""
    for each in get_args(annotation) or (annotation,):
        if get_origin(each) is None and isinstance(each, type) and issubclass(each, BaseModel):
            yield each
