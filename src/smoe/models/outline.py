"""What a model is made of, by names and sizes: its weights, where its experts are, what a token leaves in caches.

Plain values, which two sources give: the library's empty model (`examine.py`), and arithmetic on the configuration
(`families.py`), which loads neither torch nor the library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from smoe.memory.dtypes import F32, Dtype
from smoe.memory.store import Part


@dataclass(frozen=True)
class ExpertsSite:
    """One layer's experts module: where it is, and what its weights look like."""

    layer: int
    name: str
    """Module path, for example `model.layers.3.mlp.experts`."""
    experts: int
    parts: tuple[Part, ...]
    transposed: frozenset[str] = frozenset()
    """The matrices that are [inputs, outputs] in the library, not the other way round."""
    takes_turns: bool = False
    """Gate and up are in turns in the library: gate, up, gate, up, ..."""


class Weight(NamedTuple):
    """A parameter of the library's model."""

    shape: tuple[int, ...]
    is_linear: bool = False
    """Whether it belongs to a linear layer."""
    is_plain: bool = False
    """Whether it belongs to a linear layer or an embedding of the library, whose place a quantised one can take."""
    is_wide: bool = False
    """Whether it is float32 in every dtype of the model."""

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


class Buffer(NamedTuple):
    """A tensor of a model that is no parameter."""

    shape: tuple[int, ...]
    item_bytes: int = F32.itemsize
    """Bytes of a number, at least those of float32: the library's loader does not narrow it."""
    is_stored: bool = False
    """Whether checkpoints have it, too."""


@dataclass(frozen=True)
class Anatomy:
    """Facts of a model that the engine and the budget need."""

    kv_bytes_per_token: int
    """Keys and values of all attention layers for one token of one sequence."""
    state_bytes_per_sequence: int
    """Recurrent and convolution states, which do not grow with the context."""
    routers: Mapping[int, str]
    """Module path of each layer's router, where it could be found."""
    gates: Mapping[int, str]
    """The routers of these that need nothing but hidden states, and so can be applied to another layer's."""
    top_k: Mapping[int, int]
    """Experts a token uses, by layer."""


@dataclass(frozen=True)
class Outline:
    """A model of one dtype."""

    weights: Mapping[str, Weight]
    """Weights by the library's names, tied ones once."""
    buffers: Mapping[str, Buffer]
    sites: list[ExpertsSite]
    """The experts modules in layer order."""
    anatomy: Anatomy
    embedding: str | None = None
    """The name of the input embedding, where the output matrix is another weight."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """The weight that each of these names shares."""
    optional: str = ""
    """A regular expression: weights of such names may lack in a checkpoint."""

    @property
    def of_experts(self) -> frozenset[str]:
        """The names of the routed experts' weights."""
        return frozenset(f"{site.name}.{part.name}" for site in self.sites for part in site.parts)

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what a checkpoint holds: parameters, tied ones once, and the buffers that are stored."""
        stored = {name: buffer.shape for name, buffer in self.buffers.items() if buffer.is_stored}
        return {name: weight.shape for name, weight in self.weights.items()} | stored

    def dense_bytes(self, dtype: Dtype) -> int:
        """Everything but the routed experts."""
        experts = self.of_experts
        total = sum(math.prod(buffer.shape) * buffer.item_bytes for buffer in self.buffers.values())
        for name, weight in self.weights.items():
            if name not in experts:
                total += weight.numbers * (F32 if weight.is_wide else dtype).itemsize
        return total
