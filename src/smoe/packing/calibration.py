"""Records the inputs of a model's experts on a text, for quantization that minimizes the error on such inputs.

For each layer there are two files; the letters are T tokens, H elements of the hidden state, K experts of each token:

    layer-3.hidden    [T, H] in the model's dtype
    layer-3.index     int32 [T, K], the experts of each row

The data are on disk, 67 MB per layer for 16,384 tokens of 2,048 elements; one layer at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from smoe.packing.compensation import Compensation, moments


class Calibration:
    """The recorded inputs of every layer's experts, in a folder of their own. They are written once and then read."""

    def __init__(self, folder: Path, modules: Mapping[int, nn.Module]) -> None:
        """`modules`: transformers' experts modules by layer, for their activation; they need no weights."""
        self._folder = folder
        self._modules = modules
        self._shapes: dict[int, tuple[int, int]] = {}
        self._dtype = torch.float32
        self._open: tuple[int, LayerInputs] | None = None

    def add(self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor) -> None:
        """Append rows to the inputs of a layer: hidden [n, H], top_k_index [n, K]."""
        self._shapes[layer], self._dtype = (hidden.shape[1], top_k_index.shape[1]), hidden.dtype
        with self._path(layer, "hidden").open("ab") as file:
            file.write(hidden.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        with self._path(layer, "index").open("ab") as file:
            file.write(top_k_index.detach().cpu().numpy().astype(np.int32).tobytes())

    def compensations(self, layer: int, expert: int, parameters: Mapping[str, torch.Tensor]) -> dict[str, Compensation]:
        """Return, by name, a rule for each of the two matrices of an expert: how rounding errors of its columns are
        compensated.

        `parameters`: the expert's weights in transformers' layout, [1, ...].
        """
        if self._open is None or self._open[0] != layer:
            self._open = layer, self.read(layer)
        inputs, module = self._open[1], self._modules[layer]
        up = "gate_up_proj" if "gate_up_proj" in parameters else "up_proj"
        own = inputs.of(expert)
        inner = activated(module, own, parameters[up][0].float(), parameters.get(f"{up}_bias"))
        return {up: Compensation(own, inputs.moments), "down_proj": Compensation(inner)}

    def read(self, layer: int) -> LayerInputs:
        """Return the recorded inputs of one layer's experts."""
        hidden, top_k = self._shapes[layer]
        rows = torch.from_numpy(np.fromfile(self._path(layer, "hidden"), np.uint8)).view(self._dtype).view(-1, hidden)
        index = torch.from_numpy(np.fromfile(self._path(layer, "index"), np.int32)).view(-1, top_k)
        return LayerInputs(rows, index)

    def _path(self, layer: int, what: str) -> Path:
        return self._folder / f"layer-{layer}.{what}"


class LayerInputs:
    """The recorded inputs of one layer's experts."""

    def __init__(self, hidden: torch.Tensor, index: torch.Tensor) -> None:
        self._hidden = hidden
        self._index = index

    @cached_property
    def moments(self) -> list[torch.Tensor]:
        """The second moments of all rows of the layer, whichever expert they are routed to."""
        return moments(self._hidden)

    def of(self, expert: int) -> torch.Tensor:
        """Return the input rows that are routed to an expert, [n, H] in float32. n may be 0."""
        return self._hidden[(self._index == expert).any(1)].float()


def activated(
    module: nn.Module, inputs: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the inputs [n, I] of an expert's second matrix product. `inputs` [n, H], `weights` and `bias` are those of
    the first product."""
    is_transposed, has_gate = bool(module.is_transposed), bool(getattr(module, "has_gate", True))
    wide = inputs @ (weights if is_transposed else weights.t())
    if bias is not None:
        wide = wide + bias[0].float()
    activate: Any = module._apply_gate if has_gate else module.act_fn
    found: torch.Tensor = activate(wide)
    return found
