"""Parts that many model families have in common. Each function yields (name, `Weight`) pairs of a part's weights."""

from __future__ import annotations

from collections.abc import Iterator

from smoe.models.outline import Weight
from smoe.models.plain_config import PlainConfig

Weights = Iterator[tuple[str, Weight]]


def linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Weights:
    yield f"{name}.weight", Weight((outputs, inputs), is_linear=True, is_plain=True)
    if bias:
        yield f"{name}.bias", Weight((outputs,), is_linear=True, is_plain=True)


def norm(name: str, size: int, bias: bool = False) -> Weights:
    yield f"{name}.weight", Weight((size,))
    if bias:
        yield f"{name}.bias", Weight((size,))


def router(name: str, c: PlainConfig, experts: int, is_wide: bool = False) -> Weights:
    yield f"{name}.weight", Weight((experts, c.hidden_size), is_wide=is_wide)


def gated(name: str, c: PlainConfig, inner: int, bias: bool = False) -> Weights:
    """Yield the weights of a gated MLP: a dense feed-forward layer or shared experts."""
    yield from linear(f"{name}.gate_proj", inner, c.hidden_size, bias)
    yield from linear(f"{name}.up_proj", inner, c.hidden_size, bias)
    yield from linear(f"{name}.down_proj", c.hidden_size, inner, bias)


def experts(name: str, c: PlainConfig, count: int, inner: int) -> Weights:
    yield f"{name}.experts.gate_up_proj", Weight((count, 2 * inner, c.hidden_size))
    yield f"{name}.experts.down_proj", Weight((count, c.hidden_size, inner))


def head_dim(c: PlainConfig) -> int:
    """Return the size of an attention head; without a field for it, the hidden size divided by the number of heads."""
    size: int = c.get("head_dim") or c.hidden_size // c.num_attention_heads
    return size


def heads(
    name: str, c: PlainConfig, bias: bool = False, output_bias: bool = False, output: str = "o_proj", gates: int = 1
) -> Weights:
    """Yield the projections of attention; `gates=2` doubles the query projection, for gated attention."""
    size = head_dim(c)
    yield from linear(f"{name}.q_proj", gates * c.num_attention_heads * size, c.hidden_size, bias)
    yield from linear(f"{name}.k_proj", c.num_key_value_heads * size, c.hidden_size, bias)
    yield from linear(f"{name}.v_proj", c.num_key_value_heads * size, c.hidden_size, bias)
    yield from linear(f"{name}.{output}", c.hidden_size, c.num_attention_heads * size, output_bias)


def head_norms(name: str, c: PlainConfig, of_query: str = "q_norm", of_key: str = "k_norm") -> Weights:
    """Yield the query and key norms that normalize each head separately."""
    yield from norm(f"{name}.{of_query}", head_dim(c))
    yield from norm(f"{name}.{of_key}", head_dim(c))


def whole_norms(name: str, c: PlainConfig) -> Weights:
    """Yield the query and key norms that normalize all heads together."""
    yield from norm(f"{name}.q_norm", c.num_attention_heads * head_dim(c))
    yield from norm(f"{name}.k_norm", c.num_key_value_heads * head_dim(c))


def latent(name: str, c: PlainConfig) -> Weights:
    """Yield the weights of multi-head latent attention (DeepSeek)."""
    count, of_query = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
    if c.q_lora_rank is None:
        yield from linear(f"{name}.q_proj", count * of_query, c.hidden_size)
    else:
        yield from linear(f"{name}.q_a_proj", c.q_lora_rank, c.hidden_size)
        yield from norm(f"{name}.q_a_layernorm", c.q_lora_rank)
        yield from linear(f"{name}.q_b_proj", count * of_query, c.q_lora_rank)
    yield from linear(f"{name}.kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
    yield from norm(f"{name}.kv_a_layernorm", c.kv_lora_rank)
    yield from linear(f"{name}.kv_b_proj", count * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    yield from linear(f"{name}.o_proj", c.hidden_size, count * c.v_head_dim)


def norms(name: str, c: PlainConfig, bias: bool = False) -> Weights:
    """Yield the norms before attention and before the feed-forward layer."""
    yield from norm(f"{name}.input_layernorm", c.hidden_size, bias)
    yield from norm(f"{name}.post_attention_layernorm", c.hidden_size, bias)
