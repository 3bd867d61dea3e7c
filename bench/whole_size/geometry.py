"""The sizes of published models, as their config.json states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class LatentAttention(NamedTuple):
    """DeepSeek's attention: keys and values have a low rank, queries a full one."""

    rank: int
    plain: int
    """The size of the part of a head without rotary embedding."""
    rotated: int
    values: int


class LinearAttention(NamedTuple):
    """Qwen3.5's gated delta rule; every `full_every`-th layer has full attention instead."""

    full_every: int
    key_heads: int
    value_heads: int
    head_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """The size of all keys of a token."""
        return self.key_heads * self.head_dim

    @property
    def values(self) -> int:
        """The size of all values of a token."""
        return self.value_heads * self.head_dim


@dataclass(frozen=True)
class Geometry:
    """One published model in one mixture."""

    architecture: str
    """The architecture's name in GGUF files."""
    mixture: str
    """The name of the mixture that llama.cpp's quantizer takes."""
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    experts: int
    top_k: int
    inner: int
    """The inner size of a routed expert."""
    vocabulary: int
    context_tokens: int
    rope_base: float
    epsilon: float = 1e-6
    dense_inner: int = 0
    """The inner size of a layer without experts."""
    dense_layers: int = 0
    """The number of layers without experts, which come first."""
    shared_inner: int = 0
    """The inner size of all shared experts of a layer together."""
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None

    @property
    def sparse_layers(self) -> range:
        """The layers that have routed experts."""
        return range(self.dense_layers, self.layers)

    def has_full_attention(self, layer: int) -> bool:
        """Return whether a layer attends to all positions."""
        return self.linear is None or (layer + 1) % self.linear.full_every == 0


PUBLISHED: Mapping[str, Geometry] = {
    "qwen3-30b-a3b-q4_k_m": Geometry(
        "qwen3moe", "Q4_K_M", layers=48, hidden=2048, heads=32, key_value_heads=4, head_dim=128, experts=128, top_k=8,
        inner=768, vocabulary=151936, context_tokens=40960, rope_base=1e6, dense_inner=6144,
    ),
    "qwen3.6-35b-a3b-q4_k_m": Geometry(
        "qwen35moe", "Q4_K_M", layers=40, hidden=2048, heads=16, key_value_heads=2, head_dim=256, experts=256, top_k=8,
        inner=512, vocabulary=248320, context_tokens=262144, rope_base=1e7, shared_inner=512,
        linear=LinearAttention(full_every=4, key_heads=16, value_heads=32, head_dim=128, kernel=4),
    ),
    "gpt-oss-20b-mxfp4": Geometry(
        "gpt-oss", "MXFP4_MOE", layers=24, hidden=2880, heads=64, key_value_heads=8, head_dim=64, experts=32, top_k=4,
        inner=2880, vocabulary=201088, context_tokens=131072, rope_base=150000, epsilon=1e-5, dense_inner=2880,
    ),
    "deepseek-v2-lite-q4_k_m": Geometry(
        "deepseek2", "Q4_K_M", layers=27, hidden=2048, heads=16, key_value_heads=16, head_dim=192, experts=64, top_k=6,
        inner=1408, vocabulary=102400, context_tokens=163840, rope_base=10000, dense_inner=10944, dense_layers=1,
        shared_inner=2816, latent=LatentAttention(rank=512, plain=128, rotated=64, values=128),
    ),
    "glm-4.5-air-q2_k": Geometry(
        "glm4moe", "Q2_K", layers=46, hidden=4096, heads=96, key_value_heads=8, head_dim=128, experts=128, top_k=8,
        inner=1408, vocabulary=151552, context_tokens=131072, rope_base=1e6, epsilon=1e-5, dense_inner=10944,
        dense_layers=1, shared_inner=1408,
    ),
}  # fmt: skip
"""The models by name. GLM-4.5-Air lacks its layer for multi-token prediction, and has llama.cpp's own mixture."""
