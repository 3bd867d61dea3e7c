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
import json
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.peers.shape import ModelShape

WEIGHT_STD = 0.02
EMBEDDING_STD = 0.5  # large enough that tokens, not the residual stream's drift, decide the routing
DEFAULT_SEED = 1234


def write_model(out: Path, shape: ModelShape, seed: int = DEFAULT_SEED) -> int:
    """Write config, weights and tokenizer of a random model to `out`; return the bytes of its weights."""
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", shape.config())
    _write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    total_bytes = _write_weights(out, shape, torch.Generator().manual_seed(seed))
    _write_tokenizer(out, shape.vocabulary)
    return total_bytes


def _write_weights(out: Path, shape: ModelShape, generator: torch.Generator) -> int:
    shards = shape.layers + 1
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number in range(shards):
        last = number == shape.layers
        tensors = _outer_tensors(shape, generator) if last else _layer_tensors(shape, number, generator)
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, out / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(out / "model.safetensors.index.json", index)
    return total_bytes


def _normal(generator: torch.Generator, *size: int, std: float = WEIGHT_STD) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16).normal_(0, std, generator=generator)


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def _layer_tensors(shape: ModelShape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    query, key_value = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.expert_inner
    tensors = {
        "input_layernorm": _ones(hidden),
        "post_attention_layernorm": _ones(hidden),
        "self_attn.q_norm": _ones(shape.head_dim),
        "self_attn.k_norm": _ones(shape.head_dim),
        "self_attn.q_proj": _normal(generator, query, hidden),
        "self_attn.k_proj": _normal(generator, key_value, hidden),
        "self_attn.v_proj": _normal(generator, key_value, hidden),
        "self_attn.o_proj": _normal(generator, hidden, query),
        "mlp.gate": _normal(generator, shape.experts, hidden),
    }
    for expert in range(shape.experts):
        tensors[f"mlp.experts.{expert}.gate_proj"] = _normal(generator, inner, hidden)
        tensors[f"mlp.experts.{expert}.up_proj"] = _normal(generator, inner, hidden)
        tensors[f"mlp.experts.{expert}.down_proj"] = _normal(generator, hidden, inner)
    return {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in tensors.items()}


def _outer_tensors(shape: ModelShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": _normal(generator, shape.vocabulary, shape.hidden, std=EMBEDDING_STD),
        "model.norm.weight": _ones(shape.hidden),
        "lm_head.weight": _normal(generator, shape.vocabulary, shape.hidden),
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
    tokenizer.save(str(out / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    _write_json(out / "tokenizer_config.json", names)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


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
