"""How many values a body has, counted in its bytes before it is parsed.

A parser in C holds Python's lock for as long as it works, and so does what validates its values: with a million small
lists in 4 MiB that is two seconds in which the server answers nothing. What is counted here bounds that time.
"""

from __future__ import annotations

import re

from smoe.server.problem import ApiError, refused

MOST_CONTAINERS = 50_000
"""Objects and lists of one body: about 30 ms of parser and as much of validation."""
MOST_VALUES = 500_000
"""Values of one body, such as the tokens of a prompt."""
MOST_FIELDS = 4096
"""The most fields of one object: validation makes an error of each that is wrong."""
_CHUNK_BYTES = 1 << 16
_BRACES = re.compile(rb"[{}]")


def check_size(data: bytes) -> None:
    """Raise an `ApiError` for a body of too many values. Takes linear time, and no step of it takes long."""
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
    """Fields since the last object began or ended. `before`: those before these bytes, which are no part of a string.
    Raises an `ApiError` where they are too many for one object."""
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
