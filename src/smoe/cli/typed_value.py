"""Finds what the user typed for an option, before or without parsing the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def typed_value(options: Sequence[str]) -> str | None:
    """Return the last value that the user typed for an option with these names; None if the option was not typed."""
    given = None
    for word, following in zip(sys.argv, [*sys.argv[1:], None], strict=True):
        if not word.startswith("-"):
            continue  # an argument may equal its command's name
        if word in options:
            given = following
        elif word.partition("=")[0] in options:
            given = word.partition("=")[2]
    return given
