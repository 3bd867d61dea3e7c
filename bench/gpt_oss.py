"""Random weights in the layout of OpenAI's gpt-oss releases: experts in MXFP4, everything else in bf16.

    python -m bench.gpt_oss OUT                # the 20b: 24 layers x 32 experts, 13.8 GB
    python -m bench.gpt_oss OUT --layers 4     # 4.2 GB, of which embedding and output matrix are 2.3
    python -m bench.gpt_oss OUT --layers 8 --vocabulary 32768      # 4.2 GB, of which they are 0.4

Random weights cost the same time as trained ones; routing differs (bench/peers/README.md). Tensors are written layer by
layer, so peak memory is one shard.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.random_weights import EMBEDDING_STD, normal, ones, save_tokenizer, write_json, write_shards

SCALE = 120  # uniform codes have a root mean square of 2.9, so 2 ** (120 - 127) makes them about as large as the rest
BLOCK = 32


@dataclass(frozen=True)
class Geometry:
    """The defaults are those of gpt-oss-20b."""

    layers: int = 24
    experts: int = 32
    experts_per_token: int = 4
    hidden: int = 2880
    inner: int = 2880
    vocabulary: int = 201088
    heads: int = 64
    key_value_heads: int = 8
    head_dim: int = 64

    @property
    def expert_bytes(self) -> int:
        """Codes, scales and biases of one expert."""
        rows = 2 * self.inner * self.hidden + self.hidden * self.inner
        return rows // BLOCK * 17 + 2 * (2 * self.inner + self.hidden)

    def config(self) -> dict[str, Any]:
        """The `config.json`, with the entries of the release."""
        kinds = ["sliding_attention", "full_attention"]
        kept = ("self_attn", "mlp.router")
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "eos_token_id": 1,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "initial_context_length": 4096,
            "intermediate_size": self.inner,
            "layer_types": [kinds[layer % 2] for layer in range(self.layers)],
            "max_position_embeddings": 131072,
            "num_attention_heads": self.heads,
            "num_experts_per_tok": self.experts_per_token,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.key_value_heads,
            "num_local_experts": self.experts,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    *(f"model.layers.*.{name}" for name in kept),
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": self.vocabulary,
        }


def write_model(out: Path, geometry: Geometry, seed: int = 0) -> int:
    """Write config, weights and tokenizer of a random model to `out`; the bytes of its weights."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", geometry.config())
    _write_tokenizer(out, geometry.vocabulary)
    return write_shards(out, _shards(geometry, torch.Generator().manual_seed(seed)), geometry.layers + 2)


def _shards(geometry: Geometry, generator: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    for layer in range(geometry.layers):
        yield _layer(geometry, layer, generator)
    size = geometry.vocabulary, geometry.hidden
    yield {"model.embed_tokens.weight": normal(generator, *size, std=EMBEDDING_STD)}
    yield {"lm_head.weight": normal(generator, *size), "model.norm.weight": ones(geometry.hidden)}


def _layer(geometry: Geometry, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, inner, experts = geometry.hidden, geometry.inner, geometry.experts
    query, key_value = geometry.heads * geometry.head_dim, geometry.key_value_heads * geometry.head_dim
    tensors = {
        "input_layernorm.weight": ones(hidden),
        "post_attention_layernorm.weight": ones(hidden),
        "self_attn.sinks": normal(generator, geometry.heads),
        "mlp.router.weight": normal(generator, experts, hidden),
        "mlp.router.bias": normal(generator, experts),
    }
    for name, (outputs, columns) in {
        "q_proj": (query, hidden),
        "k_proj": (key_value, hidden),
        "v_proj": (key_value, hidden),
        "o_proj": (hidden, query),
    }.items():
        tensors[f"self_attn.{name}.weight"] = normal(generator, outputs, columns)
        tensors[f"self_attn.{name}.bias"] = normal(generator, outputs)
    for name, (outputs, columns) in {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}.items():
        blocks = experts, outputs, columns // BLOCK
        tensors[f"mlp.experts.{name}_blocks"] = _bytes(generator, 0, 256, *blocks, BLOCK // 2)
        tensors[f"mlp.experts.{name}_scales"] = _bytes(generator, SCALE - 1, SCALE + 2, *blocks)
        tensors[f"mlp.experts.{name}_bias"] = normal(generator, experts, outputs)
    return {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}


def _bytes(generator: torch.Generator, low: int, high: int, *size: int) -> torch.Tensor:
    return torch.randint(low, high, size, dtype=torch.uint8, generator=generator)


def _write_tokenizer(out: Path, vocabulary: int) -> None:
    """One token a byte, and names for the rest: no benchmark reads what is written."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{n}>" for n in range(len(words), vocabulary)]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    save_tokenizer(out, tokenizer)


def main() -> None:
    """Write the model named on the command line."""
    parser = argparse.ArgumentParser(description="Write a random-weight gpt-oss checkpoint with MXFP4 experts.")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--layers", type=int, default=Geometry.layers, help=f"default {Geometry.layers}")
    parser.add_argument("--vocabulary", type=int, default=Geometry.vocabulary, help=f"default {Geometry.vocabulary}")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    geometry = Geometry(layers=given.layers, vocabulary=given.vocabulary)
    total = write_model(given.out, geometry, given.seed)
    found = {"bytes": total, "expert_bytes": geometry.expert_bytes, "experts": geometry.layers * geometry.experts}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
