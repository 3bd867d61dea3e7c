"""The reference model: random weights in the layout of a Qwen3-MoE checkpoint.

    python -m bench.peers.model OUT               # 12 layers x 64 experts, 7.54 GB in bf16, about 20 s
    python -m bench.peers.model OUT --layers 2    # smaller ones for trials

The default shape is that of a fine-grained MoE (top-8 of 64, one expert 9.44 MB) that no machine holds in 4 GiB, yet
every machine can make in seconds. Random weights cost the same time as trained ones; only *routing* differs: see the
README for what that means for hit rates.

Tensors are written layer by layer, so peak memory is one shard. safetensors sorts names, hence the three matrices of
one expert lie side by side in the file, `down | gate | up`: one read fetches an expert, and gate is directly followed
by up.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch

from bench.peers.shape import ModelShape
from bench.random_weights import EMBEDDING_STD, normal, ones, save_tokenizer, write_json, write_shards

DEFAULT_SEED = 1234


def write_model(out: Path, shape: ModelShape, seed: int = DEFAULT_SEED) -> int:
    """Write config, weights and tokenizer of a random model to `out`; return the bytes of its weights."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", shape.config())
    write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    shards = _shards(shape, torch.Generator().manual_seed(seed))
    total_bytes = write_shards(out, shards, shape.layers + 1)
    _write_tokenizer(out, shape.vocabulary)
    return total_bytes


def _shards(shape: ModelShape, generator: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    for layer in range(shape.layers):
        yield _layer_tensors(shape, layer, generator)
    yield _outer_tensors(shape, generator)


def _layer_tensors(shape: ModelShape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    query, key_value = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.expert_inner
    tensors = {
        "input_layernorm": ones(hidden),
        "post_attention_layernorm": ones(hidden),
        "self_attn.q_norm": ones(shape.head_dim),
        "self_attn.k_norm": ones(shape.head_dim),
        "self_attn.q_proj": normal(generator, query, hidden),
        "self_attn.k_proj": normal(generator, key_value, hidden),
        "self_attn.v_proj": normal(generator, key_value, hidden),
        "self_attn.o_proj": normal(generator, hidden, query),
        "mlp.gate": normal(generator, shape.experts, hidden),
    }
    for expert in range(shape.experts):
        tensors[f"mlp.experts.{expert}.gate_proj"] = normal(generator, inner, hidden)
        tensors[f"mlp.experts.{expert}.up_proj"] = normal(generator, inner, hidden)
        tensors[f"mlp.experts.{expert}.down_proj"] = normal(generator, hidden, inner)
    return {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in tensors.items()}


def _outer_tensors(shape: ModelShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": normal(generator, shape.vocabulary, shape.hidden, std=EMBEDDING_STD),
        "model.norm.weight": ones(shape.hidden),
        "lm_head.weight": normal(generator, shape.vocabulary, shape.hidden),
    }


def _write_tokenizer(out: Path, vocabulary: int) -> None:
    """Write a byte-level BPE tokenizer of exactly `vocabulary` entries; converters demand one, no benchmark uses it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    tokenizer.add_tokens([f"<pad{i}>" for i in range(vocabulary - tokenizer.get_vocab_size())])
    save_tokenizer(out, tokenizer)


def main() -> None:
    """Write the model named on the command line."""
    parser = argparse.ArgumentParser(description="Write a random-weight Qwen3-MoE checkpoint.")
    parser.add_argument("out", type=Path, help="directory to create")
    for field in fields(ModelShape):
        if field.type != "int":
            continue  # what is written is bf16
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=int, default=field.default, help=f"default {field.default}")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    options = vars(parser.parse_args())
    out, seed = options.pop("out"), options.pop("seed")
    shape = ModelShape(**options)
    total_bytes = write_model(out, shape, seed)
    print(f"{total_bytes / 1e9:.2f} GB of weights, one expert {shape.expert_bytes / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
