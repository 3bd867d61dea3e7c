"""How many values a body has, counted in its bytes before it is parsed.

A parser in C holds Python's lock for as long as it works, and so does what validates its values: with a million small
lists in 4 MiB that is two seconds in which the server answers nothing. What is counted here bounds that time.
"""

from __future__ import annotations

from smoe.server.problem import refused

MOST_CONTAINERS = 50_000
"""Objects and lists of one body: about 30 ms of parser and as much of validation."""
MOST_VALUES = 500_000
"""Values of one body, such as the tokens of a prompt."""
_CHUNK_BYTES = 1 << 16


def check_size(data: bytes) -> None:
    """Raise an `ApiError` for a body of too many values. Takes linear time, and no step of it takes long."""
    if _is_small(_containers(data), data.count(b",")):
        return
    containers = commas = 0
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


def _containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _is_small(containers: int, commas: int) -> bool:
    return containers <= MOST_CONTAINERS and commas < MOST_VALUES
