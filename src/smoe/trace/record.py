"""The format of a routing trace: a header that describes the recording, and one row for each token and layer.

All rows have the same size. Where layers differ, a row is as wide as the widest layer: the rest has logits of minus
infinity, the index E ("no expert") and weights of zero. `docs/traces.md` describes the layout to the byte.
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
"""The phases; a row stores the index in this list."""


@dataclass(frozen=True)
class TracedLayer:
    """The description of one layer's router: its numbers of experts and its scoring rule."""

    layer: int
    experts: int
    """E, the number of experts."""
    top_k: int
    """K, the experts chosen for each token."""
    rule: dict[str, Any] | None = None
    """The rule from logits to scores, as `ScoringRule.as_json` writes it; None where it is unknown."""


@dataclass(frozen=True)
class TraceHeader:
    """The description of what was recorded."""

    model: str
    """The model's name, as the user gave it."""
    model_type: str
    alpha: float
    """The substitution threshold of the run; above 0 the routers' inputs include what substitutes computed."""
    layers: tuple[TracedLayer, ...]
    """The layers with routed experts, ascending."""
    smoe: str = __version__
    """The version of smoe that wrote the trace."""
    expert_bytes: tuple[int, ...] | None = None
    """The memory of a resident expert in bytes, by layer; None: unknown."""

    @property
    def experts(self) -> int:
        """The number of routed experts in all layers."""
        return sum(layer.experts for layer in self.layers)

    @cached_property
    def row(self) -> np.dtype[np.void]:
        """The NumPy type of a row: little-endian, without gaps."""
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
        """Return the header in its file form; `row` there is the description of a `numpy.dtype`, with tuples for its
        entries."""
        return {**asdict(self), "row": self.row.descr}

    def blank_rows(self, layer: TracedLayer, count: int) -> np.ndarray:
        """Return [count] rows of a layer without any choice."""
        rows = np.zeros(count, self.row)
        rows["layer"], rows["top_k_index"], rows["router_logits"] = layer.layer, layer.experts, -np.inf
        return rows

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TraceHeader:
        """Return the header of a file. Raises `KeyError`, `TypeError` or `ValueError` for a damaged one."""
        layers = tuple(TracedLayer(**layer) for layer in value["layers"])
        sizes = value.get("expert_bytes")
        known = None if sizes is None else tuple(map(int, sizes))
        header = cls(value["model"], value["model_type"], value["alpha"], layers, value["smoe"], known)
        if known is not None and (len(known) != len(layers) or min(known) < 1):
            raise ValueError("its sizes of experts are not those of its layers")
        if np.dtype([tuple(field) for field in value["row"]]) != header.row:
            raise ValueError("its rows are not those of its layers")
        return header
