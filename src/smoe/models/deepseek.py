"""DeepSeekMoE 16B (`model_type: deepseek`), from transformers parts.

Architecture: Dai et al., "DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts Language Models"
(arXiv 2401.06066), section 3: fine-grained experts, shared experts. The published remote code does not import under
transformers v5, so the model is put together here from library classes: Llama attention, norms and dense MLP,
Qwen2-MoE router and experts.

The MoE block, for one token `x`:  `sum over top-k of softmax(gate(x))_e * expert_e(x)  +  shared_experts(x)`.
Softmax runs over all experts; the chosen weights are not renormalised unless `norm_topk_prob` says so (false in the
16B files). The shared experts are published as one MLP of `n_shared_experts * moe_intermediate_size`.

Two differences from the published code: with `norm_topk_prob` it adds 1e-20 to the denominator, which is below fp32
rounding; in bf16 it chooses experts by scores already rounded to bf16, where ties fall arbitrarily, while the library's
router chooses by fp32 scores.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import LlamaConfig
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeMLP, Qwen2MoeTopKRouter

from smoe.errors import UnsupportedModelError
from smoe.models.registration import register_family


class DeepseekConfig(LlamaConfig):
    """The configuration with the keys of the published `config.json`; the defaults are the 16B model's values.

    Keys of Llama keep their meaning. `intermediate_size` is that of the dense layers only. Training keys
    (`aux_loss_alpha`, `seq_aux`) are stored unchanged.
    """

    model_type = "deepseek"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "n_routed_experts"}

    vocab_size: int = 102400
    hidden_size: int = 2048
    intermediate_size: int = 10944
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    moe_intermediate_size: int = 1408
    n_routed_experts: int = 64
    n_shared_experts: int | None = 2
    num_experts_per_tok: int = 6
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"

    def is_sparse_layer(self, layer_index: int) -> bool:
        """Return whether a layer has experts: from `first_k_dense_replace` on, every layer that `moe_layer_freq`
        divides."""
        return layer_index >= self.first_k_dense_replace and layer_index % self.moe_layer_freq == 0


class DeepseekMoeBlock(nn.Module):
    """Routed experts plus the always-active shared experts, under the published parameter names."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        if config.scoring_func != "softmax":
            raise UnsupportedModelError(
                f"deepseek: config.json has scoring_func {config.scoring_func!r}; only 'softmax' is known for this type"
            )
        self.gate = Qwen2MoeTopKRouter(config)
        self.experts = Qwen2MoeExperts(config)
        self.shared_experts = shared_experts(config, config.n_shared_experts)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the block's output [B, S, H] for hidden states [B, S, H]: B sequences of S tokens."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # [T, H]
        _, routing_weights, top_k_index = self.gate(tokens)  # [T, K] both
        output: torch.Tensor = self.experts(tokens, top_k_index, routing_weights)  # [T, H]
        if self.shared_experts is not None:
            output = output + self.shared_experts(tokens)
        return output.reshape(hidden_states.shape)


def shared_experts(config: Any, count: int | None) -> nn.Module | None:
    """Return `count` shared experts as one wide MLP, which is how they are published; None if `count` is 0 or None."""
    return Qwen2MoeMLP(config, intermediate_size=config.moe_intermediate_size * count) if count else None


class DeepseekPreTrainedModel(LlamaPreTrainedModel):
    """Llama's base class with the initialization of experts and router."""

    config_class: type[LlamaConfig] = DeepseekConfig
    router_classes: ClassVar[tuple[type[nn.Module], ...]] = (Qwen2MoeTopKRouter,)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (Qwen2MoeExperts, *self.router_classes)):
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return True always, because other code may compute the experts. transformers would look for its decorator in
        the source file of the class, but this file only imports the experts."""
        return True


class DeepseekModel(DeepseekPreTrainedModel, LlamaModel):
    """Llama whose sparse layers have an MoE block in place of the dense MLP."""

    block_class: ClassVar[type[nn.Module]] = DeepseekMoeBlock

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        for layer_index, layer in enumerate(self.layers):
            if config.is_sparse_layer(layer_index):
                layer.mlp = self.block_class(config)
        self.post_init()


class DeepseekForCausalLM(DeepseekPreTrainedModel, LlamaForCausalLM):
    """The language model that `AutoModelForCausalLM` returns for `model_type: deepseek`."""

    model_class: ClassVar[type[LlamaModel]] = DeepseekModel

    def __init__(self, config: DeepseekConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)  # LlamaForCausalLM's constructor would build a dense model
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def register() -> None:
    """Register `model_type: deepseek` with the Auto classes. It must be called before `AutoConfig.from_pretrained`;
    further calls have no effect."""
    register_family(DeepseekConfig, DeepseekForCausalLM)
