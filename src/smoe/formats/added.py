"""Formats that installed packages add, for types of GGUF files that the gguf package does not know.

A package declares an entry point in the group `smoe.formats`. Its name is ggml's number of the type, such as 144, and
its value is a `Format`. The package is imported only for a file that contains the type.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from smoe.errors import ConfigError
from smoe.formats.base import Format
from smoe.formats.registry import FORMATS

GROUP = "smoe.formats"


@cache
def added_format(number: int) -> Format | None:
    """Return the format that an installed package adds for the ggml type `number`, and add the format to `FORMATS`.
    Return None if no package adds one.

    Raises `ConfigError` if several packages add a format for this number, or if the format cannot be used.
    """
    places = sorted({point.value for point in entry_points(group=GROUP, name=str(number))})
    if not places:
        return None
    if len(places) > 1:
        raise _refusal(number, places, f"{' and '.join(places)} offer it; uninstall all packages but one")
    (point, *_) = entry_points(group=GROUP, name=str(number))
    try:
        found = point.load()
    except Exception as error:  # a module of another package may raise anything
        raise _refusal(number, places, f"importing it failed with {type(error).__name__}: {error}") from error
    if not isinstance(found, Format):
        raise _refusal(number, places, "it is no smoe.formats.base.Format")
    if found.name in FORMATS:
        raise _refusal(number, places, f"its name {found.name} is that of a built-in format; give it another one")
    FORMATS[found.name] = found
    return found


def _refusal(number: int, places: list[str], why: str) -> ConfigError:
    return ConfigError(
        f"the plug-in for ggml's type {number} ({', '.join(places)}) cannot be used: {why}",
        setting=GROUP,
        given=", ".join(places),
        allowed="one Format with a name of its own",
    )
