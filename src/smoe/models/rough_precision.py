"""Estimates how many bits a quantized weight of the experts has, from quantization settings that smoe does not read.

Quantization libraries give different names to the same setting. The first of these settings that is present is used,
with those about experts before others of the same line:

    load_in_4bit, load_in_8bit                        bitsandbytes
    config_groups: {group: {weights: {num_bits}}}     compressed-tensors
    bits, w_bit, nbits, num_bits                      GPTQ, AWQ, EXL2, HQQ
    names: int4, fp8, nvfp4, mxfp4, nf4, W4A16        modelopt, quark, quanto, torchao

Settings of activations, of the KV cache and of the dtype in which codes are stored or computed are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_FLAGS = {"load_in_4bit": 4, "load_in_8bit": 8}
_COUNTS = ("bits", "w_bit", "nbits", "num_bits")
_NAMES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (r"(?<![a-z])w(\d)a\d", r"(?:int|float|fp)(\d)_?weight", r"(?:int|float|fp|nf)(\d)(?!\d)")
]
"""Bits in the names of formats; those of the weights come before those of activations."""
_NOT_OF_WEIGHTS = re.compile(r"activation|input|output|kv|cache|storage|compute|meta|llm_int8|skip|ignore|exclude")
"""A part of the names of fields that say nothing about the weights."""
_PRECISIONS = {16: None, 8: "int8", 4: "int4", 3: "int3", 2: "int2"}
"""{bits: the precision of smoe whose size is used in place of a quantization with about as many bits}."""
_DEEPEST = 6
"""How many objects within each other are read."""


def nearest_precision(settings: Mapping[str, Any]) -> str | None:
    """Return the precision of smoe whose bits are nearest to those of the settings, the larger one of two; None if the
    number of bits is unknown, or nearest to that of unquantized weights."""
    bits = stated_bits(settings)
    return None if bits is None else _PRECISIONS[min(_PRECISIONS, key=lambda known: abs(known - bits))]


def stated_bits(settings: Mapping[str, Any]) -> float | None:
    """Return how many bits a weight has according to quantization settings (over 0, at most 16), or None if they do
    not say it."""
    flags = [bits for name, bits in _FLAGS.items() if settings.get(name) is True]
    leaves = sorted(_leaves(settings), key=lambda leaf: ("expert" not in "/".join(leaf[0]), len(leaf[0])))
    counts = [_count(value) for path, value in leaves if path[-1] in _COUNTS]
    names = [_named(value) for _, value in leaves]
    found = (*flags, *_of_groups(settings.get("config_groups")), *counts, *names)
    return next((bits for bits in found if bits is not None), None)


def _of_groups(groups: object) -> Iterator[float | None]:
    """Yield the bits of weights in the groups of compressed-tensors, those whose targets are experts first."""
    found = [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    for group in sorted(found, key=lambda each: "expert" not in str(each.get("targets"))):
        weights = group.get("weights")
        yield _count(weights.get("num_bits")) if isinstance(weights, dict) else None


def _leaves(fields: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (the names of the objects and of the field, its value) for all fields that may be about weights."""
    for name, value in fields.items():
        if _NOT_OF_WEIGHTS.search(name.lower()):
            continue
        if not isinstance(value, dict):
            yield (*path, name), value
        elif len(path) < _DEEPEST:
            yield from _leaves(value, (*path, name))


def _count(value: object) -> float | None:
    """Return a number of bits, which may be written as text; None for any other value."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) and value is not True and 0 < value <= 16 else None


def _named(value: object) -> float | None:
    """Return the bits in the name of a format; None for any other value."""
    matches = (pattern.search(value) for pattern in _NAMES) if isinstance(value, str) else ()
    return next((_count(match[1]) for match in matches if match is not None), None)
