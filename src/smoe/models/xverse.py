"""XVERSE-MoE-A4.2B and -A36B (`model_type: xverse`), from transformers parts.

The vendor says that the model follows DeepSeekMoE's structure. It differs from `deepseek.py` in names and router:

- every layer is sparse; `intermediate_size` is that of one expert; the router is `mlp.router`, its top-k `moe_top_k`;
- the router is stored and computed in fp32, whatever the dtype of the rest;
- the chosen softmax weights are divided by their sum plus 1e-6.

Known from public files: `config.json` of both models; for A4.2B also the key names, and that routers are stored in fp32
(an index of its tensors gives a total size that only fits so). **Unverified** against the published file: the
renormalisation and its 1e-6. A public copy of the model's own code always renormalises; the vendor's later port to a
serving engine does so only if `norm_topk_prob` is set, and no published `config.json` sets it. Here it depends on
`norm_topk_prob`, and is true if that is missing. A4.2B is published as `pytorch_model.bin` shards, so it has to be
converted to safetensors before its experts can be read one by one.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

from smoe.errors import NotMoEError
from smoe.models.deepseek import DeepseekForCausalLM, DeepseekModel, DeepseekPreTrainedModel, shared_experts
from smoe.models.registration import register_family

RENORMALISE_EPSILON = 1e-6


class XverseConfig(LlamaConfig):
    """The configuration with the keys of the published `config.json`; the defaults are A4.2B's values.

    Keys of Llama keep their meaning. `num_experts` has no default, because dense XVERSE models have the same
    `model_type` and lack the key.
    """

    model_type = "xverse"
    attribute_map: ClassVar[dict[str, str]] = {
        "num_experts_per_tok": "moe_top_k",
        "moe_intermediate_size": "intermediate_size",
    }

    vocab_size: int = 100534
    hidden_size: int = 2560
    intermediate_size: int = 1728
    num_hidden_layers: int = 28
    num_attention_heads: int = 32
    max_position_embeddings: int = 8192
    pad_token_id: int | None = 1
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3
    num_experts: int | None = None
    moe_top_k: int = 6
    num_shared_experts: int | None = 2
    norm_topk_prob: bool = True

    def is_sparse_layer(self, layer_index: int) -> bool:
        """Return True always: every layer of an XVERSE MoE model has experts."""
        return True


class XverseTopKRouter(nn.Module):
    """The router `mlp.router`: fp32 softmax over all experts, top-k, renormalized with a small term in the
    denominator."""

    def __init__(self, config: XverseConfig) -> None:
        super().__init__()
        if config.num_experts is None:
            raise NotMoEError(
                "xverse: config.json has no num_experts, so this is a dense XVERSE model; use an XVERSE-MoE one"
            )
        self.top_k = config.moe_top_k
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size, dtype=torch.float32))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (router logits [T, E] in fp32, routing weights [T, K], chosen experts [T, K]) for hidden states [T,
        H]."""
        router_logits = nn.functional.linear(hidden_states.float(), self.weight.float())
        routing_weights, top_k_index = torch.topk(router_logits.softmax(dim=-1), self.top_k, dim=-1)
        if self.norm_topk_prob:
            routing_weights = routing_weights / (routing_weights.sum(dim=-1, keepdim=True) + RENORMALISE_EPSILON)
        return router_logits, routing_weights.to(hidden_states.dtype), top_k_index


class XverseMoeBlock(nn.Module):
    """Routed experts plus the always-active shared experts, under the published parameter names."""

    def __init__(self, config: XverseConfig) -> None:
        super().__init__()
        self.router = XverseTopKRouter(config)
        self.experts = Qwen2MoeExperts(config)
        self.shared_experts = shared_experts(config, config.num_shared_experts)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the block's output [B, S, H] for hidden states [B, S, H]: B sequences of S tokens."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # [T, H]
        _, routing_weights, top_k_index = self.router(tokens)  # [T, K] both
        output: torch.Tensor = self.experts(tokens, top_k_index, routing_weights)  # [T, H]
        if self.shared_experts is not None:
            output = output + self.shared_experts(tokens)
        return output.reshape(hidden_states.shape)


class XversePreTrainedModel(DeepseekPreTrainedModel):
    """DeepSeek's base class with XVERSE's fp32 router."""

    config_class: type[LlamaConfig] = XverseConfig
    router_classes: ClassVar[tuple[type[nn.Module], ...]] = (XverseTopKRouter,)
    _keep_in_fp32_modules_strict: set[str] | list[str] | None = ["mlp.router"]


class XverseModel(XversePreTrainedModel, DeepseekModel):
    """Llama with an MoE block in every layer."""

    block_class: ClassVar[type[nn.Module]] = XverseMoeBlock


class XverseForCausalLM(XversePreTrainedModel, DeepseekForCausalLM):
    """The language model that `AutoModelForCausalLM` returns for `model_type: xverse`."""

    model_class: ClassVar[type[LlamaModel]] = XverseModel


def register() -> None:
    """Register `model_type: xverse` with the Auto classes. It must be called before `AutoConfig.from_pretrained`;
    further calls have no effect."""
    register_family(XverseConfig, XverseForCausalLM)
