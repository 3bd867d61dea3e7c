"""What checkpoints of random weights are made of: tensors, shards with their index, a tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WEIGHT_STD = 0.02
EMBEDDING_STD = 0.5  # large enough that tokens, not the residual stream's drift, decide the routing


def normal(generator: torch.Generator, *size: int, std: float = WEIGHT_STD) -> torch.Tensor:
    """A bf16 weight."""
    return torch.empty(size, dtype=torch.bfloat16).normal_(0, std, generator=generator)


def ones(size: int) -> torch.Tensor:
    """The weight of a norm."""
    return torch.ones(size, dtype=torch.bfloat16)


def write_shards(out: Path, shards: Iterable[dict[str, torch.Tensor]], count: int) -> int:
    """Write `count` shards, each as it is made, and their index; the bytes of all weights."""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(tensors, out / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(out / "model.safetensors.index.json", index)
    return total_bytes


def save_tokenizer(out: Path, tokenizer: Any) -> None:
    """The files of a `tokenizers.Tokenizer` whose first tokens are `<s>` and `</s>`."""
    tokenizer.save(str(out / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(out / "tokenizer_config.json", names)


def write_json(path: Path, value: object) -> None:
    """A file for people to read, too."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
