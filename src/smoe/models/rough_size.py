"""Estimates the size of the experts of a model family that smoe does not have, from usual fields of its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smoe.memory.dtypes import BF16
from smoe.units import format_bytes

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k")
_INNER = ("moe_intermediate_size", "intermediate_size")
_MATRICES = 3
"""The matrices of a gated expert."""


def rough_size(fields: Mapping[str, Any]) -> str | None:
    """Return a sentence with the estimated size of the experts; None if a usual field is missing or not a number.
    `fields`: those of the whole config.json."""
    nested = fields.get("text_config")
    text = nested if isinstance(nested, Mapping) else fields
    layers, hidden = _number(text, ("num_hidden_layers",)), _number(text, ("hidden_size",))
    experts, inner, chosen = (_number(text, names) for names in (_EXPERTS, _INNER, _CHOSEN))
    if layers is None or hidden is None or experts is None or inner is None:
        return None
    each = _MATRICES * hidden * inner * BF16.itemsize
    used = "" if chosen is None else f"; a token uses {chosen} in each layer, {format_bytes(layers * chosen * each)}"
    return (
        f"by the usual meaning of its fields, the experts take at most {format_bytes(layers * experts * each)} in "
        f"bfloat16 (up to {layers} layers of {experts} experts of {format_bytes(each)}{used})"
    )


def _number(fields: Mapping[str, Any], names: Sequence[str]) -> int | None:
    found = (fields[name] for name in names if type(fields.get(name)) is int)
    return next((number for number in found if number > 0), None)
