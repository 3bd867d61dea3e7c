"""The format of a routing trace: a header that describes the recording, and one row for each token and layer.

All rows have the same size, that of the widest layer. In narrower layers, the unused fields of a row have logits of
minus infinity, the index E ("no expert") and weights of zero. `docs/traces.md` describes the layout byte by byte.
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
"""The phases of generation. A row of a trace contains an index of this tuple."""


@dataclass(frozen=True)
class TracedLayer:
    """The description of one layer's router: its number of experts, and its scoring rule."""

    layer: int
    experts: int
    """E, the number of experts."""
    top_k: int
    """K, the number of experts chosen for each token."""
    rule: dict[str, Any] | None = None
    """The rule from logits to scores, as `ScoringRule.as_json` writes it; None if it is unknown."""


@dataclass(frozen=True)
class TraceHeader:
    """The header of a trace, which describes the recorded model and run."""

    model: str
    """The model's name, as the user wrote it."""
    model_type: str
    alpha: float
    """The substitution threshold of the run. If it is above 0, substitutes have affected the inputs of the routers."""
    layers: tuple[TracedLayer, ...]
    """The layers with routed experts, ascending."""
    smoe: str = __version__
    """The version of smoe that wrote the trace."""
    expert_bytes: tuple[int, ...] | None = None
    """For each layer, the memory of a resident expert in bytes; None if it is unknown."""

    @property
    def experts(self) -> int:
        """The number of routed experts in all layers."""
        return sum(layer.experts for layer in self.layers)

    @cached_property
    def row(self) -> np.dtype[np.void]:
        """The NumPy type of a row: little-endian, without padding bytes."""
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
        """Return the header in the form in which it is stored. The value of `row` describes the NumPy type of a row,
        with tuples."""
        return {**asdict(self), "row": self.row.descr}

    def blank_rows(self, layer: TracedLayer, count: int) -> np.ndarray:
        """Return `count` rows of a layer in which no expert is chosen."""
        rows = np.zeros(count, self.row)
        rows["layer"], rows["top_k_index"], rows["router_logits"] = layer.layer, layer.experts, -np.inf
        return rows

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TraceHeader:
        """Return the header that `as_json` wrote. Raise `KeyError`, `TypeError` or `ValueError` if it is damaged."""
        layers = tuple(TracedLayer(**layer) for layer in value["layers"])
        sizes = value.get("expert_bytes")
        known = None if sizes is None else tuple(map(int, sizes))
        header = cls(value["model"], value["model_type"], value["alpha"], layers, value["smoe"], known)
        if known is not None and (len(known) != len(layers) or min(known) < 1):
            raise ValueError("the sizes of experts in the trace's header do not match its layers")
        if np.dtype([tuple(field) for field in value["row"]]) != header.row:
            raise ValueError("the row format in the trace's header does not match its layers")
        return header
