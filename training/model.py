"""A compact trainable mirror of transformers' `Qwen2MoeForCausalLM` and `MixtralForCausalLM`.

It computes the same functions with the same parameters, but keeps the experts of a layer in two stacked tensors and
offers two ways of evaluating them on a CPU: `dense` (all experts as three large matrices, masked by the routing
weights) and `routed` (rows sorted by expert, one small product per expert, with a hand-written backward pass).

Letters: B rows of a batch, S positions, T = B * S tokens, K chosen experts, E experts, H hidden, I inner width of an
expert, V vocabulary, L layers.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model; the defaults are those of the demonstration model.

    With a shared expert it is a Qwen2-MoE, without one a Mixtral, which has no attention biases either and always
    renormalises the weights of the chosen experts.
    """

    vocab_size: int = 4096
    hidden_size: int = 192
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    num_experts: int = 64
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 32
    shared_expert_intermediate_size: int = 256
    """0: no shared expert."""
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    norm_topk_prob: bool = True
    attention_bias: bool = True

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"hidden {self.hidden_size}, heads {self.num_attention_heads} and key-value heads "
                f"{self.num_key_value_heads} do not divide each other"
            )
        if not 0 < self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"cannot choose {self.num_experts_per_tok} of {self.num_experts} experts")
        if self.is_mixtral and (self.attention_bias or not self.norm_topk_prob):
            raise ValueError(
                "a model without a shared expert is a Mixtral: set `attention_bias` to False and leave "
                "`norm_topk_prob` True"
            )

    @property
    def is_mixtral(self) -> bool:
        """Whether transformers knows this shape as Mixtral, else as Qwen2-MoE."""
        return self.shared_expert_intermediate_size == 0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def to_dict(self) -> dict[str, int | float | bool]:
        """The fields as plain values, for a checkpoint."""
        return asdict(self)


SHAPES = {
    "demo": ModelConfig(),
    "witness": ModelConfig(
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=192,
        shared_expert_intermediate_size=0,
        attention_bias=False,
    ),
}
"""The models of this project by name."""


@dataclass
class Routing:
    """What the routers of all layers did in one forward pass."""

    router_logits: list[Tensor]
    """One [T, E] tensor a layer."""
    top_k_index: list[Tensor]
    """One [T, K] tensor a layer."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return functional.rms_norm(hidden_states, (hidden_states.shape[-1],), self.weight, self.eps)


def rotary_tables(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each [S, head_dim]."""
    inverse_frequency = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float), inverse_frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [B, heads, S, head_dim]."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: list[int] | None) -> Tensor:
    """Causal attention of [B, heads, S, head_dim], as [B, S, heads, head_dim].

    `lengths` cuts the B * S positions, row after row, into documents that do not see each other. One product a document
    costs less than one masked product a row, because documents are much shorter than rows.
    """
    if lengths is None:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    pieces = (
        states.transpose(1, 2).flatten(0, 1).split(lengths)  # [n, heads, head_dim] each
        for states in (query, key, value)
    )
    mixed = [
        functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True
        )[0].transpose(0, 1)
        for q, k, v in zip(*pieces, strict=True)
    ]
    return torch.cat(mixed)


class Attention(nn.Module):
    """Causal grouped-query attention, with or without biases on q, k and v."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, lengths: list[int] | None) -> Tensor:
        """[B, S, H] -> [B, S, H]; with `lengths`, tokens attend within their document only"""
        batch, seq_len, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(batch, seq_len, self.heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(batch, seq_len, self.kv_heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(batch, seq_len, self.kv_heads, self.head_dim).transpose(1, 2)
        repeat = self.heads // self.kv_heads
        key = rotate(key, cos, sin).repeat_interleave(repeat, dim=1)
        value = value.repeat_interleave(repeat, dim=1)
        mixed = attend(rotate(query, cos, sin), key, value, lengths)
        out: Tensor = self.o_proj(mixed.reshape(batch, seq_len, -1))
        return out


class RoutedExperts(torch.autograd.Function):
    """Sum over the chosen experts, evaluated only where a token chose one.

    The T * K (token, choice) pairs are sorted by expert; each expert then multiplies one contiguous block of rows.
    The loops issue 2 E products forward and 4 E backward, without an autograd node each.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """hidden [T, H], index and weights [T, K], gate_up [E, 2I, H], down [E, H, I] -> [T, H]"""
        tokens, top_k = top_k_index.shape
        flat = top_k_index.reshape(-1)
        order = torch.argsort(flat, stable=True)
        bounds = [0, *torch.bincount(flat, minlength=gate_up.shape[0]).cumsum(0).tolist()]
        token = order // top_k
        weight = top_k_weights.reshape(-1)[order, None]  # [TK, 1]
        rows = hidden[token]  # [TK, H]
        gate_up_rows = rows.new_empty(rows.shape[0], gate_up.shape[1])  # [TK, 2I]
        for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
            torch.mm(rows[begin:end], gate_up[expert].t(), out=gate_up_rows[begin:end])
        gate, up = gate_up_rows.chunk(2, dim=-1)
        inner = functional.silu(gate).mul_(up)  # [TK, I]
        weighted = inner * weight
        out_rows = torch.empty_like(rows)
        for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
            torch.mm(weighted[begin:end], down[expert].t(), out=out_rows[begin:end])
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        ctx.save_for_backward(rows, gate_up_rows, inner, weight, order, place, token, gate_up, down)
        ctx.bounds, ctx.top_k = bounds, top_k
        return out_rows[place].view(tokens, top_k, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """grad [T, H] -> gradients of hidden, weights, gate_up and down."""
        rows, gate_up_rows, inner, weight, _order, place, token, gate_up, down = ctx.saved_tensors
        bounds, top_k = ctx.bounds, ctx.top_k
        grad_rows = grad[token]  # [TK, H]
        grad_weighted = torch.empty_like(inner)
        grad_down = torch.zeros_like(down)
        weighted = inner * weight
        for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
            if begin == end:
                continue
            torch.mm(grad_rows[begin:end], down[expert], out=grad_weighted[begin:end])
            torch.mm(grad_rows[begin:end].t(), weighted[begin:end], out=grad_down[expert])
        grad_weight = (grad_weighted * inner).sum(-1)
        grad_inner = grad_weighted.mul_(weight)
        gate, up = gate_up_rows.chunk(2, dim=-1)
        grad_gate_up_rows = torch.empty_like(gate_up_rows)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        torch.mul(grad_inner, silu, out=grad_gate_up_rows[:, gate.shape[1] :])
        # d silu(g) / dg = s + g s (1 - s)
        torch.mul(grad_inner.mul_(up), silu.mul_(1 - sigmoid).add_(sigmoid), out=grad_gate_up_rows[:, : gate.shape[1]])
        grad_gate_up = torch.zeros_like(gate_up)
        grad_hidden_rows = torch.empty_like(rows)
        for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
            if begin == end:
                continue
            torch.mm(grad_gate_up_rows[begin:end], gate_up[expert], out=grad_hidden_rows[begin:end])
            torch.mm(grad_gate_up_rows[begin:end].t(), rows[begin:end], out=grad_gate_up[expert])
        grad_hidden = grad_hidden_rows[place].view(grad.shape[0], top_k, -1).sum(1)
        grad_top_k_weights = grad_weight[place].view(grad.shape[0], top_k)
        return grad_hidden, None, grad_top_k_weights, grad_gate_up, grad_down


def dense_experts(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same sum with every expert evaluated for every token and masked by its routing weight.

    hidden [T, H], index and weights [T, K], gate_up [E, 2I, H], down [E, H, I] -> [T, H]
    """
    experts, double_inner, width = gate_up.shape
    inner_width = double_inner // 2
    routing = hidden.new_zeros(hidden.shape[0], experts).scatter(1, top_k_index, top_k_weights)  # [T, E]
    gate = hidden @ gate_up[:, :inner_width].reshape(-1, width).t()  # [T, E * I]
    up = hidden @ gate_up[:, inner_width:].reshape(-1, width).t()
    inner = (functional.silu(gate) * up).view(-1, experts, inner_width) * routing[:, :, None]
    return inner.reshape(hidden.shape[0], -1) @ down.transpose(1, 2).reshape(-1, width)


def routed_experts(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`RoutedExperts` with the signature of `dense_experts`."""
    out: Tensor = RoutedExperts.apply(hidden, top_k_index, top_k_weights, gate_up, down)
    return out


EXPERT_BACKENDS = {"dense": dense_experts, "routed": routed_experts}


class SharedExpert(nn.Module):
    """The SwiGLU expert that every token uses."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class SparseMoeBlock(nn.Module):
    """Router, experts and, if there is one, the gated shared expert of one layer."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.has_shared_expert = config.shared_expert_intermediate_size > 0
        if self.has_shared_expert:
            self.shared_expert = SharedExpert(hidden, config.shared_expert_intermediate_size)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)
        self.backend = EXPERT_BACKENDS[backend]

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, H] -> output [B, S, H], router logits [T, E], chosen experts [T, K]"""
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        router_logits = self.gate(hidden)
        top_k_weights, top_k_index = router_logits.float().softmax(-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            top_k_weights = top_k_weights / top_k_weights.sum(-1, keepdim=True)
        out = self.backend(hidden, top_k_index, top_k_weights.to(hidden.dtype), self.gate_up_proj, self.down_proj)
        if self.has_shared_expert:
            out = out + torch.sigmoid(self.shared_expert_gate(hidden)) * self.shared_expert(hidden)
        return out.view_as(hidden_states), router_logits, top_k_index


class DecoderLayer(nn.Module):
    """Attention and the sparse block, each behind a norm and on a residual path."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SparseMoeBlock(config, backend)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden_states: Tensor, cos: Tensor, sin: Tensor, lengths: list[int] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, H] -> hidden states [B, S, H], router logits [T, E], chosen experts [T, K]"""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), cos, sin, lengths)
        moe, router_logits, top_k_index = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + moe, router_logits, top_k_index


class MoeModel(nn.Module):
    """The language model: tied embeddings around L decoder layers."""

    cos: Tensor
    """[positions, head_dim]"""
    sin: Tensor
    """[positions, head_dim]"""

    def __init__(self, config: ModelConfig, backend: str = "routed") -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, backend) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rotary_tables(config.max_position_embeddings, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, input_ids: Tensor, lengths: list[int] | None = None) -> tuple[Tensor, Routing]:
        """[B, S] token ids -> final hidden states [B, S, H] (before the head) and the routing

        `lengths`, if given, are those of the documents that share the rows; see `document_lengths`.
        """
        seq_len = input_ids.shape[1]
        cos, sin = self.cos[:seq_len], self.sin[:seq_len]
        hidden_states, routing = self.embed_tokens(input_ids), Routing([], [])
        for layer in self.layers:
            hidden_states, router_logits, top_k_index = layer(hidden_states, cos, sin, lengths)
            routing.router_logits.append(router_logits)
            routing.top_k_index.append(top_k_index)
        return self.norm(hidden_states), routing

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., V], with the tied embedding as head"""
        return hidden_states @ self.embed_tokens.weight.t()


@torch.no_grad()
def initialise(model: MoeModel, generator: torch.Generator) -> None:
    """Draw the initial weights: fan-in scaled matrices, small output projections, zero biases, unit norms."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = 0.7 * parameter.shape[-1] ** -0.5
        if "embed_tokens" in name:
            std = 0.05
        elif "shared_expert_gate" in name or name.endswith("mlp.gate.weight"):
            std = 0.02
        elif "o_proj" in name or "down_proj" in name:
            std *= 0.1
        parameter.normal_(0.0, std, generator=generator)


def document_lengths(input_ids: Tensor, end_id: int) -> list[int]:
    """Lengths of the documents of [B, S] in row order; one ends after each `end_id` and at the end of each row."""
    last = input_ids == end_id
    last[:, -1] = True
    ends = last.flatten().nonzero()[:, 0] + 1
    return torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
