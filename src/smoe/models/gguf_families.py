"""What the GGUF files of each architecture say in their own way: how sizes are named, what goes without saying, and
which rows lie in another order than the library's.

Adding a family is one entry here, and a toy of it in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.memory.gguf_header import GgufHeader

NEXT_TOKEN_LAYERS = "num_nextn_predict_layers"
"""The library's name of the number of layers, behind all others, that guess further tokens; it has none of them."""
_SIGMOID = (0, 2)
"""How a router's scores are made: by a sigmoid, also where a file does not say it."""


@dataclass(frozen=True)
class GgufFamily:
    """An architecture of GGUF files, and the library's family that computes the same."""

    model_type: str
    """transformers' name."""
    sizes: Mapping[str, str]
    """The library's name of a size by the metadata entry that says it, beside those that all families have."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """What no file says, by the library's name."""
    fixed_yarn: Mapping[str, Any] = field(default_factory=dict)
    """The same of positions that are scaled by YaRN."""
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of entries that mean what the library computes, where other families have others."""
    told: Mapping[str, str] = field(default_factory=dict)
    """Settings of the library that are on where a file has a tensor of this name."""
    has_partial_rotary: bool = False
    """Whether positions turn but a part of a head, which files say."""
    has_paired_rows: bool = False
    """Whether rows of the query and key matrices that are turned together by the position lie next to each other; the
    library has them half a head apart."""
    split: str = "qwen2"
    """How a text is split before its merges where a file does not say it."""


FAMILIES: Mapping[str, GgufFamily] = {
    "glm4moe": GgufFamily(
        "glm4_moe",
        {
            "attention.key_length": "head_dim",
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
            "nextn_predict_layers": NEXT_TOKEN_LAYERS,
        },
        fixed={NEXT_TOKEN_LAYERS: 0},
        allowed={"expert_gating_func": _SIGMOID},
        told={"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
        has_partial_rotary=True,
        split="glm4",
    ),
    "gpt-oss": GgufFamily(
        "gpt_oss",
        {
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.key_length": "head_dim",
            "attention.sliding_window": "sliding_window",
        },
        fixed_yarn={"truncate": False},
        split="gpt-4o",
    ),
    "llama": GgufFamily(
        "mixtral",
        {
            "expert_count": "num_local_experts",
            "rope.dimension_count": "head_dim",
            "attention.key_length": "head_dim",
        },
        has_paired_rows=True,
        split="llama-bpe",
    ),
    "minimax-m2": GgufFamily(
        "minimax_m2",
        {
            "attention.key_length": "head_dim",
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
        allowed={"expert_gating_func": _SIGMOID},
        has_partial_rotary=True,
        split="minimax-m2",
    ),
    "olmoe": GgufFamily(
        "olmoe",
        {"expert_count": "num_experts", "expert_feed_forward_length": "intermediate_size"},
        split="olmo",
    ),
    "qwen2moe": GgufFamily(
        "qwen2_moe",
        {
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_weights_norm": "norm_topk_prob",
        },
    ),
    "qwen3moe": GgufFamily(
        "qwen3_moe",
        {
            "attention.key_length": "head_dim",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_norm": "norm_topk_prob",
        },
        fixed={"norm_topk_prob": True},  # the format's own program takes it for granted
    ),
}
"""By the architecture's name in the file."""


def architecture_of(header: GgufHeader) -> str:
    """The name that a file has for its family; raises `UnsupportedModelError` for one that smoe does not read."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{header.path} does not say which architecture it is for; download it again")
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{header.path} holds a model of the architecture {name!r:.80}; of GGUF files smoe reads "
            f"{', '.join(FAMILIES)}: take the model's safetensors release, which may well work"
        )
    return name
