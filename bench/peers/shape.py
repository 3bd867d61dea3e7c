"""The shape of a model: what a Qwen3-MoE config or a GGUF file says, and what one token has to touch.

Letters of the code base: L layers, E experts, K experts per token, H hidden, I inner width of an expert.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from smoe.memory.gguf_header import read_gguf_header
from smoe.memory.gguf_index import index_gguf


class Shape(Protocol):
    """What a comparison has to know of a model."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: gate, up and down; the mean where layers differ."""

    @property
    def dense_bytes(self) -> int:
        """Bytes every token reads besides experts: attention, router and head (the embedding gives one row only)."""

    @property
    def touched_bytes(self) -> int:
        """Bytes of weights one decoded token reads from memory."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of the model; the defaults are the reference model of the benchmarks."""

    layers: int = 12
    experts: int = 64
    experts_per_token: int = 8
    hidden: int = 2048
    expert_inner: int = 768
    vocabulary: int = 4096
    heads: int = 16
    key_value_heads: int = 4
    head_dim: int = 128
    bytes_per_weight: float = 2.0
    """bf16; of a quantised file the mean."""

    @property
    def weights(self) -> int:
        """Of the whole model, norms aside."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_value_heads)
        experts = self.experts * 3 * self.hidden * self.expert_inner
        return self.layers * (attention + self.experts * self.hidden + experts) + 2 * self.vocabulary * self.hidden

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: gate, up and down."""
        return int(3 * self.hidden * self.expert_inner * self.bytes_per_weight)

    @property
    def dense_bytes(self) -> int:
        """Bytes every token reads besides experts: attention, router and head (the embedding gives one row only)."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_value_heads)
        per_layer = attention + self.experts * self.hidden
        return int((self.layers * per_layer + self.vocabulary * self.hidden) * self.bytes_per_weight)

    @property
    def touched_bytes(self) -> int:
        """Bytes of weights one decoded token reads from memory."""
        return self.layers * self.experts_per_token * self.expert_bytes + self.dense_bytes

    def config(self) -> dict[str, object]:
        """The `config.json` of this model."""
        named = {key: getattr(self, name) for name, key in CONFIG_KEYS.items()}
        return FIXED_CONFIG | named | {"intermediate_size": 3 * self.hidden}


CONFIG_KEYS = {
    "layers": "num_hidden_layers",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "hidden": "hidden_size",
    "expert_inner": "moe_intermediate_size",
    "vocabulary": "vocab_size",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}

FIXED_CONFIG: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "initializer_range": 0.02,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
}


def read_shape(model: Path) -> ModelShape:
    """The shape a model directory's config states."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    missing = sorted(key for key in CONFIG_KEYS.values() if key not in config)
    if missing:
        raise ValueError(
            f"{model.name}/config.json lacks {', '.join(missing)}: the harness knows models of type qwen3_moe "
            "(make one with `python -m bench.peers.model`)"
        )
    return ModelShape(**{name: config[key] for name, key in CONFIG_KEYS.items()})


@dataclass(frozen=True)
class GgufShape:
    """Sizes of a GGUF model, of its own bytes."""

    vocabulary: int
    experts: int
    """Of all layers."""
    experts_per_token: int
    """Of all layers."""
    all_expert_bytes: int
    embedding_bytes: int
    dense_bytes: int
    key_value_bytes: int
    """Of one position, at 16 bits a number."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, the mean of all layers."""
        return self.all_expert_bytes // self.experts

    @property
    def touched_bytes(self) -> int:
        """Bytes of weights one decoded token reads from memory."""
        return self.experts_per_token * self.expert_bytes + self.dense_bytes

    @property
    def resident_bytes(self) -> int:
        """What is in memory beside experts: the embedding, too."""
        return self.embedding_bytes + self.dense_bytes


def read_gguf_shape(file: Path) -> GgufShape:
    """The shape of the model in one GGUF file."""
    header = read_gguf_header(file)
    tensors = index_gguf([header])
    said = header.metadata
    family = said["general.architecture"]
    layers = sum(key.endswith("ffn_down_exps.weight") for key in tensors)
    if not layers:
        raise ValueError(f"{file.name} holds no experts: choose the file of a mixture of experts")
    experts = {key: tensor.nbytes for key, tensor in tensors.items() if "_exps." in key}
    embedding = tensors["token_embd.weight"]
    # a model without an output matrix of its own multiplies by its embedding, and so reads all of it
    embedding_bytes = embedding.nbytes if "output.weight" in tensors else 0
    dense_bytes = sum(tensor.nbytes for tensor in tensors.values()) - sum(experts.values()) - embedding_bytes
    rows = sum(tensor.shape[0] for key, tensor in tensors.items() if key.endswith(("attn_k.weight", "attn_v.weight")))
    return GgufShape(
        vocabulary=embedding.shape[0],
        experts=layers * _number(said[f"{family}.expert_count"]),
        experts_per_token=layers * _number(said[f"{family}.expert_used_count"]),
        all_expert_bytes=sum(experts.values()),
        embedding_bytes=embedding_bytes,
        dense_bytes=dense_bytes,
        key_value_bytes=2 * rows,
    )


def _number(value: object) -> int:
    assert isinstance(value, int), value
    return value
