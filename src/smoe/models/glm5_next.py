"""GLM-5.3-Flash without its image part (`glm5_next_text`), which GGUF files contain.

transformers has a class for the whole model only. This class combines transformers' language model, its output matrix
and the `forward` of its causal language models.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from transformers import GenerationMixin
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM


class Glm5NextForCausalLM(Glm5NextPreTrainedModel, GenerationMixin):
    """The language model for `model_type: glm5_next_text`."""

    config_class = Glm5NextTextConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    forward = LlamaForCausalLM.forward

    @classmethod
    def from_config(cls, config: Glm5NextTextConfig, **options: Any) -> Glm5NextForCausalLM:
        """Return the model without weights, under the name of transformers' Auto classes."""
        made: Glm5NextForCausalLM = cls._from_config(config, **options)
        return made

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return True: other code may compute the experts. The method of transformers would return False, because it
        searches this file, which only imports the experts, for their decorator."""
        return True


MODEL = Glm5NextForCausalLM
