"""What a routing trace is made of: a header that says what was recorded, and one row for each token and layer.

All rows have the same size. Where layers differ, a row is as wide as the widest: what a layer does not have is filled
with logits of minus infinity, its index E ("no expert") and weights of zero. The layout to the byte: `docs/traces.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from smoe import __version__
from smoe.routing import Phase

PHASES = (Phase.PREFILL, Phase.DECODE)
"""A row's phase is the place in this list."""


@dataclass(frozen=True)
class TracedLayer:
    """One layer's router."""

    layer: int
    experts: int
    """E"""
    top_k: int
    """K"""
    rule: dict[str, Any] | None = None
    """How its logits become scores, as `ScoringRule.as_json` writes it; None where no known rule is its own."""


@dataclass(frozen=True)
class TraceHeader:
    """What was recorded, and with what."""

    model: str
    """The model's name, as the user gave it."""
    model_type: str
    alpha: float
    """The substitution threshold of the run; above 0 the routers saw what substitutes had computed."""
    layers: tuple[TracedLayer, ...]
    """Layers with routed experts, ascending."""
    smoe: str = __version__
    """The version that wrote the trace."""
    expert_bytes: tuple[int, ...] | None = None
    """Memory that a resident expert takes, layer by layer; None: unknown."""

    @property
    def experts(self) -> int:
        """Routed experts of all layers."""
        return sum(layer.experts for layer in self.layers)

    @cached_property
    def row(self) -> np.dtype[np.void]:
        """One row: little-endian, no gaps."""
        experts, top_k = max(layer.experts for layer in self.layers), max(layer.top_k for layer in self.layers)
        return np.dtype(
            [
                ("step", "<u4"),
                ("sequence", "<u4"),
                ("layer", "<u2"),
                ("phase", "<u2"),
                ("top_k_weights", "<f4", (top_k,)),
                ("top_k_index", "<u2", (top_k,)),
                ("router_logits", "<f2", (experts,)),
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """The header as the file has it; `row` there is what `numpy.dtype` takes, its entries made tuples."""
        return {**asdict(self), "row": self.row.descr}

    def blank_rows(self, layer: TracedLayer, count: int) -> np.ndarray:
        """[count] rows of a layer in which nothing has been chosen."""
        rows = np.zeros(count, self.row)
        rows["layer"], rows["top_k_index"], rows["router_logits"] = layer.layer, layer.experts, -np.inf
        return rows

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TraceHeader:
        """The header of a file; raises `KeyError`, `TypeError` or `ValueError` where it is damaged."""
        layers = tuple(TracedLayer(**layer) for layer in value["layers"])
        sizes = value.get("expert_bytes")
        known = None if sizes is None else tuple(map(int, sizes))
        header = cls(value["model"], value["model_type"], value["alpha"], layers, value["smoe"], known)
        if known is not None and (len(known) != len(layers) or min(known) < 1):
            raise ValueError("its sizes of experts are not those of its layers")
        if np.dtype([tuple(field) for field in value["row"]]) != header.row:
            raise ValueError("its rows are not those of its layers")
        return header
