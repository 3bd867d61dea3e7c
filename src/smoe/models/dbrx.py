"""DBRX (`model_type: dbrx`): the transformers model, changed so that its experts can be replaced.

transformers lets other code compute a model's experts if their class has the decorator `use_experts_implementation`
(its *experts interface*). DBRX's class lacks it. The files store the experts of a layer as three matrices [E * I, H]
for gate, up and down, one expert below the other; the down matrix is transposed. Here, gate and up of an expert are one
part, and down is another. Here the router returns the chosen experts; in transformers the block chooses them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DbrxConfig
from transformers import initialization as init
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter
from transformers.integrations.moe import use_experts_implementation
from transformers.models.dbrx import modeling_dbrx as library


@use_experts_implementation
class StackedExperts(library.DbrxExperts):
    """DBRX's experts with the parameters `gate_up_proj` [E, 2I, H] and `down_proj` [E, I, H]."""

    transposed_parts = ("down_proj",)
    """The parts that are stored as [inputs, outputs], although the class itself is not marked as transposed."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name in list(dict(self.mlp.named_parameters())):
            del self.mlp._parameters[name]
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.ffn_hidden_size, self.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.ffn_hidden_size, self.hidden_size))
        self.act_fn = self.mlp.activation_fn

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' output [T, H] for hidden states [T, H], chosen experts [T, K] and weights [T, K].
        transformers' own loop computes the output; it gets the matrices under the names that it expects."""
        gate, up = self.gate_up_proj.chunk(2, dim=1)
        self.mlp.w1, self.mlp.v1, self.mlp.w2 = (each.flatten(0, 1) for each in (gate, up, self.down_proj))
        try:
            found: torch.Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return found.view_as(hidden_states)
        finally:
            del self.mlp.w1, self.mlp.v1, self.mlp.w2


class DbrxChoosingRouter(library.DbrxRouter):
    """DBRX's router, which also chooses the experts of each token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.top_k = config.moe_top_k
        self.moe_normalize_expert_weights = config.moe_normalize_expert_weights

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (logits [T, E], weights [T, K], chosen experts [T, K]) for hidden states [T, H]."""
        router_logits = super().forward(hidden_states)
        return router_logits, *library.DbrxFFN.route_tokens_to_experts(self, router_logits)


class ChoosingFFN(library.DbrxFFN):
    """DBRX's MoE block, in which the router chooses the experts."""

    def __init__(self, config: DbrxConfig) -> None:
        super().__init__(config)
        self.router = DbrxChoosingRouter(config.ffn_config)
        self.experts = StackedExperts(config.ffn_config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the block's output [B, S, H] for hidden states [B, S, H]: B sequences of S tokens."""
        tokens = hidden_states.flatten(0, -2)
        _, top_k_weights, top_k_index = self.router(tokens)
        output: torch.Tensor = self.experts(tokens, top_k_index, top_k_weights)
        return output.view_as(hidden_states)


class ChoosingDbrxForCausalLM(library.DbrxForCausalLM):
    """The DBRX language model, changed so that other code can compute its experts: its routers return the chosen
    experts."""

    @classmethod
    def from_config(cls, config: DbrxConfig, **options: Any) -> ChoosingDbrxForCausalLM:
        """Return the model without trained weights, as transformers' Auto classes do."""
        made: ChoosingDbrxForCausalLM = cls._from_config(config, **options)
        return made

    def __init__(self, config: DbrxConfig) -> None:
        super().__init__(config)
        for block in self.transformer.blocks:
            block.ffn = ChoosingFFN(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, StackedExperts):
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)
        elif not isinstance(module, library.DbrxExpertGLU) or dict(module.named_parameters()):
            super()._init_weights(module)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return True always, because other code may compute the experts. transformers would look for its decorator in
        the source file of the class."""
        return True


class ExpertsOfRows(ConversionOps):
    """A weight conversion from one matrix [E * I, H], in which the experts are one below the other, to [E, I, H]."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        experts = kwargs["config"].ffn_config.moe_num_experts
        found = {name: each[0] if isinstance(each, list) else each for name, each in input_dict.items()}
        split = {name: each.unflatten(0, (experts, -1)) for name, each in found.items()}
        return split if len(split) > 1 else {target_patterns[0]: split.popitem()[1]}


register_checkpoint_conversion_mapping(  # for this class only: transformers' own class needs no conversion
    "ChoosingDbrxForCausalLM",
    [
        WeightConverter(
            ["ffn.experts.mlp.w1", "ffn.experts.mlp.v1"],
            "ffn.experts.gate_up_proj",
            operations=[ExpertsOfRows(), Concatenate(dim=1)],
        ),
        WeightConverter("ffn.experts.mlp.w2", "ffn.experts.down_proj", operations=[ExpertsOfRows()]),
    ],
    overwrite=True,
)
MODEL = ChoosingDbrxForCausalLM
