"""Names of a model's modules as configurations have them: whole, in part, as patterns, or by another way to the decoder
than the library's."""

from __future__ import annotations

import re
from contextlib import suppress
from fnmatch import translate
from functools import lru_cache

_LAYER = re.compile(r"(?:^|\.)(layers\.(?:\d+|\*).*)$")
_NO_DECODER = re.compile(r"(^|[._])(mtp|nextn|visual|vision|audio|encoder)([._]|$)")
_WAYS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Where a language model lies within a model for more than text, by the library and in files."""


def in_decoder(module: str) -> str:
    """A module's name from the number of its layer on, whatever the way to the decoder is called, or the name of the
    output matrix; empty for what belongs to no layer of the decoder."""
    if module.rpartition(".")[2] == "lm_head":
        return "lm_head"
    found = _LAYER.search(module)
    return found[1] if found and not _NO_DECODER.search(module[: found.start(1)]) else ""


def is_named(patterns: tuple[str, ...], module: str) -> bool:
    """Whether one of a configuration's patterns names a module of the library, by any of the ways to it."""
    way = next((way for way in _WAYS if module.startswith(way)), None)
    names = {module} if way is None else {module, *(other + module.removeprefix(way) for other in _WAYS)}
    plain, others = _by_kind(patterns)
    return any(not plain.isdisjoint(_parts(name)) or any(other.match(name) for other in others) for name in names)


def _parts(module: str) -> set[str]:
    """Every run of a name's parts, itself among them."""
    parts = module.split(".")
    return {".".join(parts[begin:end]) for end in range(1, len(parts) + 1) for begin in range(end)}


@lru_cache(maxsize=8)
def _by_kind(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Names, of which a release may list thousands, and what has to be matched; what is no expression names nothing."""
    plain, others = set(), []
    for pattern in patterns:
        if not pattern.startswith("re:") and not any(letter in pattern for letter in "*?["):
            plain.add(pattern)
            continue
        with suppress(re.error):
            others.append(re.compile(pattern[3:] if pattern.startswith("re:") else translate(pattern)))
    return frozenset(plain), tuple(others)
