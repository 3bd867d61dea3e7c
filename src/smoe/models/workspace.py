"""Activation memory of the largest step, estimated from the configuration: the budget's `workspace` entry.

An upper estimate on purpose: the cgroup tests and the wide demo check that a run stays inside. Logits are those of
the last position only, as generation asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from smoe.models.outline import ExpertsSite

if TYPE_CHECKING:
    from smoe.models.spec import ModelConfig

_HIDDEN_COPIES = 10
"""Tensors [tokens, H] alive at once: residual, norm, projections, block input and output, combination."""
_ROUTER_COPIES = 4
_FLOOR_BYTES = 1 << 20
PIECE_ELEMENTS = 2**22
"""Numbers of a quantised layer's weights that are unpacked at a time (`quantised_linear.py`)."""
KERNEL_CACHE_BYTES = 128 * 2**20
"""What the CPU library keeps for the shapes it has met: compiled kernels and scratch (docs/log/memory.md). Reserved in
full for models of 4 GiB and more; for a model so small that this would dwarf it, what is not reserved is a line of the
process outside the budget (`machine/process_memory.py`)."""


class Workspace(NamedTuple):
    """Bytes of a step, by what they depend on."""

    fixed: int
    """Whatever the step."""
    position: int
    """Bytes for each of its positions."""
    square: int
    """More, times the square of its positions."""


def workspace_of(
    config: ModelConfig,
    sites: Sequence[ExpertsSite],
    top_k: Mapping[int, int],
    rows: int,
    item: int,
    experts_bytes: int,
    widest: int,
) -> Workspace:
    """What a step over `rows` sequences takes at `item` bytes an element.

    `experts_bytes` are all routed experts of the model together; `widest` is the largest dimension that any of its
    weights has: a configuration may name widths of layers that the model lacks.
    """
    text = config.get_text_config()
    hidden = int(text.hidden_size)
    heads = _largest(text, "num_attention_heads") or 1
    head_dim = _largest(text, "head_dim") or _largest(text, "v_head_dim") or hidden // heads
    attention = heads * head_dim * 5 * item
    has_scores = getattr(text, "_attn_implementation", "sdpa") == "eager"
    of_experts = max(part.shape[-1] for site in sites for part in site.parts if part.name == "down_proj")
    inner = max(min(_inner(text), widest), of_experts)
    experts = max(site.experts for site in sites)
    width = max(top_k.values())
    position = hidden * _HIDDEN_COPIES * item + inner * 4 * item + experts * _ROUTER_COPIES * 4 + width * (hidden + 32)
    logits = rows * int(text.vocab_size) * (2 * item + 8)
    fixed = _FLOOR_BYTES + logits + reserved_kernel_bytes(experts_bytes)
    return Workspace(fixed, position + attention, heads * (item + 4) if has_scores else 0)


def reserved_kernel_bytes(experts_bytes: int) -> int:
    """The part of the CPU library's caches inside the budget, for a model with so many bytes of routed experts."""
    return min(KERNEL_CACHE_BYTES, experts_bytes // 32)


def _inner(text: Any) -> int:
    names = (
        "intermediate_size",
        "shared_expert_intermediate_size",
        "moe_intermediate_size",
        "shared_intermediate_size",
    )
    return max(_largest(text, name) for name in names)


def _largest(text: Any, name: str) -> int:
    """A size of the configuration, of all layers the largest where they differ; 0 where there is none."""
    is_heterogeneous = getattr(text, "is_heterogeneous", False)  # such a one refuses to be asked for all layers
    return max(int(getattr(each, name, None) or 0) for each in (text.per_layer_config if is_heterogeneous else [text]))
