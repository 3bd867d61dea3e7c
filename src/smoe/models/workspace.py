"""Estimates the memory for activations of the largest step: the entry `workspace` of the budget.

The estimate is an upper bound, which tests in cgroups and runs of the wide demo check. Logits are counted for the last
position only, because generation needs no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from smoe.models.outline import ExpertsSite

if TYPE_CHECKING:
    from smoe.models.spec import ModelConfig

_HIDDEN_COPIES = 10
"""The number of tensors [tokens, H] that exist at once: residual, norm, projections, block input and output,
combination."""
_ROUTER_COPIES = 4
_FLOOR_BYTES = 1 << 20
WIDE_ROWS = 512
"""The number of rows that the image encoder computes in float32 at a time."""
PIECE_ELEMENTS = 2**22
"""The number of elements of quantized non-expert weights that are dequantized at once (`quantised_linear.py`)."""
KERNEL_CACHE_BYTES = 128 * 2**20
"""The memory that the CPU library uses for compiled kernels and temporary data, which depends on shapes
(docs/log/memory.md).

The budgets of models of 4 GiB and more include all of it. For small models, the rest counts as memory of the process
outside the budget (`machine/process_memory.py`).
"""


class Workspace(NamedTuple):
    """The memory in bytes that a step needs, as a polynomial in the step's number of positions."""

    fixed: int
    """The number of bytes that every step needs."""
    position: int
    """The additional number of bytes per position."""
    square: int
    """The additional number of bytes per pair of positions: it is multiplied by the square of their number."""
    packed: int
    """The number of bytes for each row that our kernel for many rows packs, with the values between the two products of
    an expert (`kernels/prompt_experts.py`)."""


def workspace_of(
    config: ModelConfig,
    sites: Sequence[ExpertsSite],
    top_k: Mapping[int, int],
    rows: int,
    item: int,
    experts_bytes: int,
    widest: int,
) -> Workspace:
    """Return the memory for activations of a step with `rows` sequences. `item`: the bytes of an element.

    `experts_bytes`: the size of all routed experts. `widest`: the largest dimension of any weight. It limits widths in
    the configuration that no layer of the model has.
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
    packed = 4 * max(hidden, inner, heads * head_dim) + 3 * inner * item
    return Workspace(fixed, position + attention, heads * (item + 4) if has_scores else 0, packed)


class ImageWorkspace(NamedTuple):
    """The memory in bytes that images take in addition to text."""

    encoder: int
    """The activations of the image encoder for one image of the largest size."""
    token: int
    """The features of one token of an image."""


def image_workspace_of(config: Any, tokens: int, item: int) -> ImageWorkspace:
    """Return the memory for images of up to `tokens` tokens. `config`: the configuration of the whole model; `item`:
    the bytes of an element."""
    vision, text = config.vision_config, config.get_text_config()
    hidden, inner = int(vision.hidden_size), _largest(vision, "intermediate_size") or 4 * int(vision.hidden_size)
    side = _largest(vision, "patch_size") or 16
    pixels = 3 * side * side * (_largest(vision, "temporal_patch_size") or 1)
    patches = tokens * _patches_per_token(vision)
    # of a patch: its pixels as read and in the model's dtype, some tensors of the hidden size in float32
    patch = pixels * (4 + item) + hidden * ((_HIDDEN_COPIES + 4) * item + 5 * 4) + inner * 3 * item
    layers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    wide = 4 * (hidden * inner + WIDE_ROWS * (hidden + inner))  # one product in float32 (`wide_linears.py`)
    return ImageWorkspace(_FLOOR_BYTES + wide + patches * patch, int(text.hidden_size) * layers * item)


def _patches_per_token(vision: Any) -> int:
    """Return how many patches of an image the encoder combines to one token."""
    side = _largest(vision, "spatial_merge_size") or _largest(vision, "pooling_kernel_size")
    ratio = getattr(vision, "pixel_shuffle_ratio", None)
    return round(ratio**-2) if ratio else max(1, side) ** 2


def reserved_kernel_bytes(experts_bytes: int) -> int:
    """Return how many of `KERNEL_CACHE_BYTES` the memory budget includes, for a model whose routed experts take
    `experts_bytes`."""
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
    """Return the field `name` of a configuration that is a size: the largest value if layers differ, or 0 if there is
    no such field."""
    is_heterogeneous = getattr(text, "is_heterogeneous", False)  # its attributes raise where layers differ
    return max(int(getattr(each, name, None) or 0) for each in (text.per_layer_config if is_heterogeneous else [text]))
