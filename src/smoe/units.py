"""Converts byte counts, rates, durations and fractions from text and to text for people, and names to keys for
programs.

Inside the program every quantity is a plain number with its unit in its name (`capacity_bytes`, `copy_seconds`). GB and
GiB occur only here.
"""

from __future__ import annotations

import math
import re

from smoe.errors import ConfigError

_POWERS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int, setting: str | None = None) -> int:
    """Return the number of bytes of a text such as "8GiB", "512M", "2GB" or "1048576". An int is returned unchanged.

    `K`, `M`, `G` and `T` alone are binary units, as in most command lines. Raise `ConfigError`, which names the
    `setting`, if the text is not a size, or if it is a number below 1024, whose unit was probably forgotten.
    """
    if not isinstance(text, str):
        return text
    match = _SIZE.fullmatch(text)
    scale = {unit.lower(): factor for unit, factor in _POWERS.items()}.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise _refusal(text, setting, "is not a size", "a size", "for example 8GiB, 512MiB, 2GB or a number of bytes")
    if not match[2] and 0 < float(match[1]) < 1024:
        with_units = f"{match[1]}GiB or {match[1]}MiB"
        raise _refusal(text, setting, f"has no unit and would be {match[1]} bytes", "a size with its unit", with_units)
    return int(float(match[1]) * scale)


_BITS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG])bit(?:/s)?\s*", re.IGNORECASE)


def parse_link(text: str, setting: str | None = None) -> float:
    """Return the bytes per second of a network rate such as "1Gbit" or "100Mbit/s". Raise `ConfigError`, which names
    the `setting`, for other texts."""
    match = _BITS.fullmatch(text)
    bits = float(match[1]) * _POWERS[match[2].upper() + "B"] if match else 0.0
    if bits <= 0:
        raise _refusal(text, setting, "is no link's rate", "a link's rate", "for example 1Gbit or 100Mbit")
    return bits / 8


def _refusal(text: str, setting: str | None, why: str, kind: str, examples: str) -> ConfigError:
    """Return the `ConfigError` for an invalid text: `why` it is invalid, what `kind` of text is required, and
    `examples`."""
    what = f"{text!r} {why}" if setting is None else f"`{setting}` is {text!r}, which {why}"
    return ConfigError(f"{what}; write {examples}", setting=setting, given=text, allowed=f"{kind}, {examples}")


def format_bytes(count: float) -> str:
    """Return a number of bytes with three significant digits and a binary unit (`1.50 GiB`)."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    unit = units[0]
    digits = 0 if unit == "B" else max(0, 2 - len(str(int(abs(value)))) + 1)
    return f"{value:.{digits}f} {unit}"


def size_to_type(nbytes: int) -> str:
    """Return a size for the command line, such as `12GiB` or `2.25GiB`, rounded down."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes * 100 // unit / 100:g}{name}"
    return str(nbytes)


def enough_to_type(nbytes: int) -> str:
    """Return the smallest size for the command line with three significant digits that is not below `nbytes`, such as
    `651MiB` or `2.25GiB`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            steps = 10 ** max(0, 3 - len(str(nbytes // unit)))
            return f"{-(-nbytes * steps // unit) / steps:.6g}{name}"
    return str(nbytes)


def format_seconds(seconds: float) -> str:
    """Return a duration with a suitable unit (`620 us`, `41.3 ms`, `2.1 s`, `2 min`, `3 min 20 s`)."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def format_remaining(seconds: float) -> str:
    """Return an estimated duration, rounded to seconds or minutes (`40 s`, `3 min`, `2 h 10 min`)."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


_UNITS_OF_TIME = (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0), ("second", 1.0))


def plain_duration(seconds: float) -> str:
    """Return an estimated duration in words (`less than a second`, `20 seconds`, `a minute`, `2 hours`)."""
    name, size = next(((name, size) for name, size in _UNITS_OF_TIME if seconds >= 0.92 * size), ("second", 0.0))
    if not size:
        return "less than a second"
    count = round(seconds / size)
    count = count if count < 10 else 5 * round(count / 5)
    one = "an hour" if name == "hour" else f"a {name}"
    return one if count == 1 else f"{count} {name}s"


def plain_span(low: float, high: float) -> str:
    """Return a range of estimated durations in words (`about a minute`, `20 seconds to 2 minutes`)."""
    first, last = plain_duration(low), plain_duration(high)
    if first == last:
        return first if first.startswith("less") else f"about {first}"
    number, _, unit = first.partition(" ")
    return f"{number if number.isdecimal() and last.endswith(unit) else first} to {last}"


def format_digits(value: float) -> str:
    """Return a number with three significant digits and no unit, for a table with units in its headings (`0.35`,
    `41.3`, `4,130`)."""
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"


def format_rate(tokens_per_second: float) -> str:
    """Return a speed with its unit (`3.27 tokens/s`, `148 tokens/s`, `43,100 tokens/s`)."""
    if tokens_per_second < 1000:
        return f"{tokens_per_second:.3g} tokens/s"
    return f"{float(f'{tokens_per_second:.3g}'):,.0f} tokens/s"


def format_bytes_rate(bytes_per_second: float) -> str:
    """Return a data rate with its unit (`2.41 GB/s`)."""
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def identifier(name: str) -> str:
    """Return a key for programs from a name for people (`the CPU's experts` -> `cpu_experts`, `KV cache` ->
    `kv_cache`)."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower().replace("'s", "")).split()
    return "_".join(words[1:] if words[:1] == ["the"] else words)


_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*")


def parse_share(text: str, setting: str | None = None) -> float:
    """Return the fraction, above 0 and at most 1, of a text such as "40%" or "0.4". Raise `ConfigError`, which names
    the `setting`, for other texts."""
    match = _SHARE.fullmatch(text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        kind = "a share" if match is None else "a share above 0 and at most 100%"
        if match and 1 < share <= 100 and not match[2]:
            why = f"has no per cent sign and would be {share:,.0%}"
            raise _refusal(text, setting, why, "a share above 0 and at most 100%", f"{match[1]}%")
        example = "for example 40% or 0.4"
        raise _refusal(text, setting, f"is not {kind}", "a share above 0 and at most 100%", example)
    return share


_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*")


def parse_seconds(text: str, setting: str | None = None) -> float:
    """Return the seconds of a text such as "40ms", "0.1s" or "500us". Raise `ConfigError`, which names the `setting`,
    unless the time is above 0."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]] if match else 0.0
    if seconds <= 0:
        kind = "a time" if match is None else "a time above 0"
        raise _refusal(text, setting, f"is not {kind}", "a time above 0", "for example 40ms or 0.1s")
    return seconds


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun in singular or plural (`1 worker`, `2 workers`)."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
