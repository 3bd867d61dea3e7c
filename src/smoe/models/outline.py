"""Names and sizes of a model's parts: weights, experts, and the bytes that a token takes in caches.

The values come from transformers' model without weights (`examine.py`), or from arithmetic on the configuration
(`families.py`), which imports neither torch nor transformers.
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
    """The experts module of one layer: its name, and the names and shapes of its weights."""

    layer: int
    name: str
    """The module's path, for example `model.layers.3.mlp.experts`."""
    experts: int
    parts: tuple[Part, ...]
    transposed: frozenset[str] = frozenset()
    """The matrices that transformers stores as [inputs, outputs] instead of [outputs, inputs]."""
    takes_turns: bool = False
    """Whether transformers interleaves the rows of gate and up: gate, up, gate, up, ..."""


class Weight(NamedTuple):
    """A parameter of a transformers model."""

    shape: tuple[int, ...]
    is_linear: bool = False
    """Whether the weight belongs to a linear layer."""
    is_plain: bool = False
    """Whether the weight belongs to a plain linear layer or embedding, which smoe's quantized module can replace."""
    is_wide: bool = False
    """Whether the weight is float32 in every dtype of the model."""

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


class Buffer(NamedTuple):
    """A tensor of a transformers model that is not a parameter."""

    shape: tuple[int, ...]
    item_bytes: int = F32.itemsize
    """The bytes of one element, at least those of float32, because transformers does not narrow buffers."""
    is_stored: bool = False
    """Whether checkpoints contain the buffer."""


@dataclass(frozen=True)
class Anatomy:
    """The cache sizes, routers and top-k that the engine and the memory budget need."""

    kv_bytes_per_token: int
    """The bytes of the keys and values of one token in all attention layers."""
    state_bytes_per_sequence: int
    """The bytes of recurrent and convolution states of one sequence. They do not grow with its length."""
    routers: Mapping[int, str]
    """The module path of each layer's router, for layers whose router was found."""
    gates: Mapping[int, str]
    """The module paths of those routers that take only hidden states, so that they can be applied to those of another
    layer."""
    top_k: Mapping[int, int]
    """The number of experts per token, by layer."""


@dataclass(frozen=True)
class Outline:
    """The weights, buffers, experts and caches of a model, with their sizes in bytes for one dtype of the weights."""

    weights: Mapping[str, Weight]
    """Weights by their transformers names; tied weights occur once."""
    buffers: Mapping[str, Buffer]
    sites: list[ExpertsSite]
    """The experts modules in layer order."""
    anatomy: Anatomy
    embedding: str | None = None
    """The name of the input embedding; None if it is also the output matrix."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """{tied name: name of the weight that it shares}."""
    optional: str = ""
    """A regular expression for names of weights that a checkpoint may lack."""
    tables: frozenset[str] = frozenset()
    """The names of embeddings with more rows than the vocabulary. They stay on disk, where rows are read when they are
    needed, and take no memory."""
    of_images: frozenset[str] = frozenset()
    """The names of the weights and buffers of the image encoder, if images were requested."""

    @property
    def of_experts(self) -> frozenset[str]:
        """The names of the routed experts' weights."""
        return frozenset(f"{site.name}.{part.name}" for site in self.sites for part in site.parts)

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of all tensors in a checkpoint: parameters (tied ones once) and stored buffers."""
        stored = {name: buffer.shape for name, buffer in self.buffers.items() if buffer.is_stored}
        return {name: weight.shape for name, weight in self.weights.items()} | stored

    def dense_bytes(self, dtype: Dtype) -> int:
        """Return the bytes that all weights and buffers except the routed experts' take in memory."""
        elsewhere = self.of_experts | self.tables
        return sum(self.bytes_of(name, dtype) for name in {*self.buffers, *self.weights} - elsewhere)

    def bytes_of(self, name: str, dtype: Dtype) -> int:
        """Return the bytes that a weight or buffer takes in memory."""
        weight = self.weights.get(name)
        if weight is None:
            buffer = self.buffers[name]
            return math.prod(buffer.shape) * buffer.item_bytes
        return weight.numbers * (F32 if weight.is_wide else dtype).itemsize
