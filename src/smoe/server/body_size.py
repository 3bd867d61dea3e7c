"""Counts the values of a request body in its bytes, before it is parsed.

A C parser holds Python's global lock while it works, and so does validation: a million small lists in 4 MiB would block
the server for two seconds. The limits here bound that time.
"""

from __future__ import annotations

import re

from smoe.server.problem import ApiError, refused

MOST_CONTAINERS = 50_000
"""The maximum number of objects and lists of a body; parsing and validating them takes about 30 ms each."""
MOST_VALUES = 500_000
"""The maximum number of values of a body, such as the tokens of a prompt."""
MOST_FIELDS = 4096
"""The largest number of fields of one object. Validation makes an error object for every wrong field, so more would
take too long."""
_CHUNK_BYTES = 1 << 16
_BRACES = re.compile(rb"[{}]")


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
