"""Compares names of modules in configurations with those of a model.

Configurations contain full names, parts of names or patterns, and the path to the decoder may differ from
transformers'.
"""

from __future__ import annotations

import re
from contextlib import suppress
from fnmatch import translate
from functools import lru_cache

_LAYER = re.compile(r"(?:^|\.)(layers\.(?:\d+|\*).*)$")
_NO_DECODER = re.compile(r"(^|[._])(mtp|nextn|visual|vision|audio|encoder)([._]|$)")
_WAYS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Prefixes of the language model within a multimodal model, in transformers and in files."""


def in_decoder(module: str) -> str:
    """Return a module's name from its layer number on, or "lm_head", whatever the prefix of the decoder is. For other
    modules, return an empty string."""
    if module.rpartition(".")[2] == "lm_head":
        return "lm_head"
    found = _LAYER.search(module)
    return found[1] if found and not _NO_DECODER.search(module[: found.start(1)]) else ""


def is_named(patterns: tuple[str, ...], module: str) -> bool:
    """Return whether a pattern of a configuration matches the name of a transformers module, with any prefix of the
    decoder."""
    way = next((way for way in _WAYS if module.startswith(way)), None)
    names = {module} if way is None else {module, *(other + module.removeprefix(way) for other in _WAYS)}
    plain, others = _by_kind(patterns)
    return any(not plain.isdisjoint(_parts(name)) or any(other.match(name) for other in others) for name in names)


def _parts(module: str) -> set[str]:
    """Return all sequences of consecutive components of a module's name."""
    parts = module.split(".")
    return {".".join(parts[begin:end]) for end in range(1, len(parts) + 1) for begin in range(end)}


@lru_cache(maxsize=8)
def _by_kind(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Return (the plain names, the regular expressions) among the patterns. Invalid expressions are dropped."""
    plain, others = set(), []
    for pattern in patterns:
        if not pattern.startswith("re:") and not any(letter in pattern for letter in "*?["):
            plain.add(pattern)
            continue
        with suppress(re.error):
            others.append(re.compile(pattern[3:] if pattern.startswith("re:") else translate(pattern)))
    return frozenset(plain), tuple(others)
