"""Parsing of request bodies: from bytes to validated fields.

A body is one JSON object in UTF-8, uncompressed. Repeated keys, NaN, Infinity, numbers too large for any field, lone
surrogates and deep nesting are refused here, so that later code need not check for them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from smoe.server.asked import AskedFields
from smoe.server.body_size import MOST_FIELDS, check_size, too_many_fields
from smoe.server.events import ClientGoneError
from smoe.server.field_errors import refusal_of, shortened
from smoe.server.problem import ApiError, refused
from smoe.server.unknown_fields import UnknownFields

_DEEPEST = 100
"""The deepest nesting of objects and lists: later code processes them recursively."""
_MOST_DIGITS = 100
_EXACT = 2.0**53
"""Whole numbers below this bound are exact as floats."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
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
