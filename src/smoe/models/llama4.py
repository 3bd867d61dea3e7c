"""Llama 4 (`model_type: llama4_text`, in files `llama4`): the library's model, whose experts hear who is wanted.

In the library every expert is given every token, multiplied by its score, which is zero where it was not chosen, and
all experts are one batched product; no module says which were chosen. Here the router of the same weights does, the
score multiplies the token before its expert as there, and the experts, with weight one, are behind the library's
experts interface. In 16 bits, in which the models are published, a row's product has the same bits however many rows
there are; in 32 bits those of a prompt may differ in the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Llama4TextConfig, PretrainedConfig
from transformers.integrations.moe import use_experts_implementation
from transformers.models.llama4 import modeling_llama4 as library

from smoe.errors import UnsupportedModelError


@use_experts_implementation(is_transposed=True)
class ChosenExperts(library.Llama4TextExperts):
    """The library's experts, for [T, H] and a choice."""

    has_weighted_inputs = True
    """The router's weights are in the inputs already."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, K], [T, K] -> [T, H]: all experts for all tokens, as the library does it, then those chosen."""
        of_all = super().forward(hidden_states.repeat(self.num_experts, 1)).unflatten(0, (self.num_experts, -1))
        total = torch.zeros_like(hidden_states)
        for expert, output in enumerate(of_all):
            token, place = torch.where(top_k_index == expert)
            total.index_add_(0, token, (output[token] * top_k_weights[token, place, None]).to(total.dtype))
        return total


class Llama4ChoosingRouter(library.Llama4Router):
    """The library's router, which says whom it chose."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H] -> logits [T, E], weights [T, K] and index [T, K]."""
        router_logits = nn.functional.linear(hidden_states, self.weight)
        highest, top_k_index = torch.topk(router_logits, self.top_k, dim=1)
        return router_logits, torch.sigmoid(highest.float()).to(highest.dtype), top_k_index


class ChoosingMoe(library.Llama4TextMoe):
    """The library's block, with a choice."""

    def __init__(self, config: Llama4TextConfig) -> None:
        super().__init__(config)
        self.experts = ChosenExperts(config)
        self.router = Llama4ChoosingRouter(config)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, S, H] -> [T, H] and the router's logits [T, E]."""
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits, scores, top_k_index = self.router(hidden_states)
        out = self.shared_expert(hidden_states)
        out.add_(self.experts(hidden_states * scores, top_k_index, torch.ones_like(scores)))
        return out, router_logits


class ChoosingLlama4ForCausalLM(library.Llama4ForCausalLM):
    """Llama 4, alone or as the text part of a release with images."""

    def __init__(self, config: Llama4TextConfig) -> None:
        if config.num_experts_per_tok != 1:
            raise UnsupportedModelError(
                f"llama4: config.json has num_experts_per_tok {config.num_experts_per_tok}; scores multiply what "
                "experts are given, which smoe does for one expert a token, as in all published models"
            )
        super().__init__(config)
        for layer in self.model.layers:
            if layer.is_moe_layer:
                layer.feed_forward = ChoosingMoe(config)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Always; the library looks for its decorator in its own source file."""
        return True

    @classmethod
    def from_config(cls, config: PretrainedConfig, **options: Any) -> ChoosingLlama4ForCausalLM:
        """Make the model of a configuration of text, or of text and images, as an Auto class does it."""
        made: ChoosingLlama4ForCausalLM = cls._from_config(config.get_text_config(), **options)
        return made

    @classmethod
    def from_pretrained(cls, place: Any, *, config: PretrainedConfig, **options: Any) -> Any:
        """The same with the weights of a folder."""
        return super().from_pretrained(place, config=config.get_text_config(), **options)


MODEL = ChoosingLlama4ForCausalLM
