"""Toy gpt_oss checkpoints with MXFP4 experts, laid out as OpenAI releases them.

Weights are quantised, and codes decoded again, by hand here, so that a wrong half of a byte in our own reading shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests import zoo

TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
QUANTISATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
Tensors = dict[str, torch.Tensor]


def encode(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [..., columns] -> codes [..., columns / 32, 16] and scales [..., columns / 32], uint8."""
    blocks = rows.float().unflatten(-1, (-1, 32))
    power = blocks.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2  # the largest code is 6, between 4 and 8
    scaled = blocks / power.exp2().unsqueeze(-1)
    between = (TABLE[:7] + TABLE[1:8]) / 2
    codes = torch.bucketize(scaled.abs().contiguous(), between) + 8 * (scaled < 0)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed.to(torch.uint8), (power + 127).to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The other way, in float32: codes [..., blocks, 16] -> numbers [..., 32 * blocks]."""
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return (TABLE[pairs.long()] * (scales.float() - 127).exp2().unsqueeze(-1)).flatten(-2)


def tensors_of(model: PreTrainedModel) -> Tensors:
    """A toy's weights under the names of the release, its experts quantised."""
    found: Tensors = {}
    for name, weight in model.state_dict().items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):  # [E, columns, outputs]
            found[f"{name}_blocks"], found[f"{name}_scales"] = encode(weight.transpose(1, 2))
        else:
            found[name] = weight.clone()
    return found


def write(folder: Path, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> Path:
    """Tensors, and the configuration of `model` with what says that its experts are in MXFP4; with several shards,
    codes and scales of one weight lie in two of them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**model.config.to_dict(), "quantization_config": QUANTISATION}
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    shard_of = {key: names[n % shards] for n, key in enumerate(sorted(tensors))}
    for name in names:
        mine = {key: tensor.contiguous() for key, tensor in tensors.items() if shard_of[key] == name}
        save_file(mine, folder / (name if shards > 1 else "model.safetensors"), metadata={"format": "pt"})
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return folder


def save(
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    change: Callable[[Tensors], None] | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a toy to `folder`; the library's model, its experts those that the codes stand for. `change` is what a
    test does to the file's tensors."""
    model = zoo.make("gpt_oss", dtype=dtype, **overrides)
    tensors = tensors_of(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if f"{name}_blocks" in tensors:
                numbers = decode(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
                weight.copy_(numbers.transpose(1, 2))
    if change is not None:
        change(tensors)
    write(folder, model, tensors, shards)
    return model
