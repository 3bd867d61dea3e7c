"""Llama 4 (`model_type: llama4_text`, in files `llama4`): transformers' model, changed so that its experts can be
replaced.

In transformers, all experts compute every token in one batched product. A score scales each token before an expert, and
is zero if the expert was not chosen. No module returns the choice. Here the router returns the choice, the score scales
the token as in transformers, and the experts have weight one. In 16 bits, the published precision, the product of a row
has the same bits for any number of rows. In 32 bits the last bit may differ in a prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Llama4Config, Llama4TextConfig, PretrainedConfig
from transformers.integrations.moe import use_experts_implementation
from transformers.models.llama4 import modeling_llama4 as library

from smoe.errors import UnsupportedModelError


@use_experts_implementation(is_transposed=True)
class ChosenExperts(library.Llama4TextExperts):
    """Llama 4's experts, which compute a given choice [T, K] for hidden states [T, H]."""

    has_weighted_inputs = True
    """Whether the router's weights are already applied to the inputs."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' output [T, H] for hidden states [T, H], chosen experts [T, K] and weights [T, K].

        All experts compute all tokens, as in transformers. Then only the outputs of the chosen ones are summed.
        """
        of_all = super().forward(hidden_states.repeat(self.num_experts, 1)).unflatten(0, (self.num_experts, -1))
        total = torch.zeros_like(hidden_states)
        for expert, output in enumerate(of_all):
            token, place = torch.where(top_k_index == expert)
            total.index_add_(0, token, (output[token] * top_k_weights[token, place, None]).to(total.dtype))
        return total


class Llama4ChoosingRouter(library.Llama4Router):
    """Llama 4's router, which also returns the chosen experts."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (logits [T, E], weights [T, K], chosen experts [T, K]) for hidden states [T, H]."""
        router_logits = nn.functional.linear(hidden_states, self.weight)
        highest, top_k_index = torch.topk(router_logits, self.top_k, dim=1)
        return router_logits, torch.sigmoid(highest.float()).to(highest.dtype), top_k_index


class ChoosingMoe(library.Llama4TextMoe):
    """Llama 4's MoE block, in which experts compute only the tokens routed to them."""

    def __init__(self, config: Llama4TextConfig) -> None:
        super().__init__(config)
        self.experts = ChosenExperts(config)
        self.router = Llama4ChoosingRouter(config)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the block's output [T, H], router logits [T, E]) for hidden states [B, S, H]: B sequences of S
        tokens."""
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits, scores, top_k_index = self.router(hidden_states)
        out = self.shared_expert(hidden_states)
        out.add_(self.experts(hidden_states * scores, top_k_index, torch.ones_like(scores)))
        return out, router_logits


class ChoosingLlama4ForCausalLM(library.Llama4ForCausalLM):
    """Llama 4's language model, alone or as the text part of a model for images and text."""

    def __init__(self, config: Llama4TextConfig) -> None:
        if config.num_experts_per_tok != 1:
            raise UnsupportedModelError(
                f"llama4: config.json has num_experts_per_tok {config.num_experts_per_tok}; smoe "
                "computes one expert per token, as in all published models, because scores scale the experts' inputs"
            )
        super().__init__(config)
        for layer in self.model.layers:
            if layer.is_moe_layer:
                layer.feed_forward = ChoosingMoe(config)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return True always, because other code may compute the experts. transformers would look for its decorator in
        the source file of the class."""
        return True

    @classmethod
    def from_config(cls, config: PretrainedConfig, **options: Any) -> ChoosingLlama4ForCausalLM:
        """Return the model without trained weights, from a configuration of text or of text and images, as
        transformers' Auto classes do."""
        made: ChoosingLlama4ForCausalLM = cls._from_config(config.get_text_config(), **options)
        return made

    @classmethod
    def from_pretrained(cls, place: Any, *, config: PretrainedConfig, **options: Any) -> Any:
        """Return the model with the weights in a folder."""
        return super().from_pretrained(place, config=config.get_text_config(), **options)


class ChoosingLlama4ForConditionalGeneration(library.Llama4ForConditionalGeneration):
    """Llama 4's model for images and text, with the language model above."""

    def __init__(self, config: Llama4Config) -> None:
        super().__init__(config)
        self.language_model = ChoosingLlama4ForCausalLM(config.text_config)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return True always, as the language model does."""
        return True

    @classmethod
    def from_config(cls, config: PretrainedConfig, **options: Any) -> ChoosingLlama4ForConditionalGeneration:
        """Return the model without trained weights, as transformers' Auto classes do."""
        made: ChoosingLlama4ForConditionalGeneration = cls._from_config(config, **options)
        return made


MODEL = ChoosingLlama4ForCausalLM
IMAGE_MODEL = ChoosingLlama4ForConditionalGeneration
