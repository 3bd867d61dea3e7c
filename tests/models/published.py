"""Checkpoints under the names of a release: random weights, how they are loaded, SwiGLU in double precision.

They are written here, not by `save_pretrained`, so that what is wrong cannot cancel out between saving and loading.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from smoe.models import registration

Tensors = dict[str, torch.Tensor]

HIDDEN, VOCAB = 64, 128
TOKENS = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))


def mlp_tensors(prefix: str, inner: int) -> Tensors:
    """One SwiGLU MLP, as published."""
    return {
        f"{prefix}.gate_proj.weight": torch.randn(inner, HIDDEN) * HIDDEN**-0.5,
        f"{prefix}.up_proj.weight": torch.randn(inner, HIDDEN) * HIDDEN**-0.5,
        f"{prefix}.down_proj.weight": torch.randn(HIDDEN, inner) * 0.5 * inner**-0.5,
    }


def moe_tensors(layer: str, router: str, experts: int, inner: int, shared: int | None) -> Tensors:
    """A router, its experts, and so many shared ones, which are published as one MLP."""
    tensors = {f"{layer}.mlp.{router}.weight": torch.randn(experts, HIDDEN) * HIDDEN**-0.5}
    for expert in range(experts):
        tensors |= mlp_tensors(f"{layer}.mlp.experts.{expert}", inner)
    return tensors | (mlp_tensors(f"{layer}.mlp.shared_experts", inner * shared) if shared else {})


def published_tensors(layers: int, block: Callable[[int, str], Tensors]) -> Tensors:
    """Random weights of a model whose layers, by number and name, have these blocks behind their attention."""
    torch.manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "model.norm.weight": 1 + 0.1 * torch.randn(HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN) * HIDDEN**-0.5,
    }
    for index in range(layers):
        layer = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = 1 + 0.1 * torch.randn(HIDDEN)
        for matrix in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{layer}.self_attn.{matrix}.weight"] = torch.randn(HIDDEN, HIDDEN) * HIDDEN**-0.5
        tensors |= block(index, layer)
    return tensors


def publish(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """Write config.json and model.safetensors."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load through the Auto classes, without trusting remote code; every tensor must have found its place."""
    registration.register_local_families()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager", output_loading_info=True
    )
    model: PreTrainedModel = loaded[0].eval()
    problems: dict[str, Any] = loaded[1]
    assert not any(problems.values()), problems
    return model


def mlp(tensors: Tensors, prefix: str, hidden: torch.Tensor) -> torch.Tensor:
    """Reference SwiGLU, in double precision."""
    gate, up, down = (tensors[f"{prefix}.{matrix}.weight"].double() for matrix in ("gate_proj", "up_proj", "down_proj"))
    return (torch.nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T
