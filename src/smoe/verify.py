"""Is it exact here? Every MoE layer of a running model against the library's own eager loop, on this machine and model.

A prompt and a few decode steps run through the offloaded model. Inside each layer the experts that were used are loaded
once more by safetensors' own reader, put together by the checkpoint's converter rules and run through the library's
loop on the same input; the two results must be equal bit by bit. As attention, router and norms are the library's own
modules, equal layers make an equal model. One layer's used experts are in memory at a time, never the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.config import EngineConfig
from smoe.errors import BudgetError
from smoe.loading import checkpoint_experts
from smoe.memory.free import free_device_bytes
from smoe.memory.store import LayerExperts
from smoe.models.experts import ExpertsSite
from smoe.models.files import fetch
from smoe.models.selftest import library_result
from smoe.planning import blueprint
from smoe.runtime.engine import Engine
from smoe.units import format_bytes

DECODE_STEPS = 2
_COPIES = 3
"""Times one layer's experts are in memory while they are read, stacked and converted."""


@dataclass(frozen=True)
class Comparison:
    """One layer in one forward pass."""

    layer: int
    phase: str
    tokens: int
    used: int
    experts: int
    is_equal: bool
    is_finite: bool
    largest_difference: float

    @property
    def is_good(self) -> bool:
        return self.is_equal and self.is_finite


@dataclass(frozen=True)
class Reference:
    """The other side: experts modules' places in the checkpoint itself (not in a packed file)."""

    sites: dict[int, ExpertsSite]
    experts: dict[int, LayerExperts]


def reference_of(model: str, config: EngineConfig, revision: str | None) -> Reference:
    """Index the checkpoint and make sure that one layer fits in RAM; raises `BudgetError` with sizes where not."""
    plan = blueprint(model, config, revision)
    experts = checkpoint_experts(fetch(model, revision), plan)
    layer_bytes = max(site.experts for site in plan.sites) * plan.expert_bytes
    free, source = free_device_bytes(torch.device("cpu"))
    if _COPIES * layer_bytes > free:
        raise BudgetError(
            f"checking needs up to {format_bytes(_COPIES * layer_bytes)} for one layer's experts "
            f"({format_bytes(layer_bytes)}, read, stacked and converted); {format_bytes(free)} are free ({source}): "
            "close other programs, give a smaller --memory, or check a shorter prompt with --tokens"
        )
    return Reference({site.layer: site for site in plan.sites}, experts)


def verify(
    model: PreTrainedModel, reference: Reference, input_ids: torch.Tensor, on_layer: Callable[[Comparison], None]
) -> list[Comparison]:
    """Run `input_ids` [1, T] and a few decode steps; every layer of every pass is compared as it is computed."""
    engine: Engine = model.offload  # type: ignore[assignment]
    modules = dict(model.named_modules())
    found: list[Comparison] = []
    ours = engine.run_experts

    def compared(
        layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        result = ours(layer, hidden, top_k_index, top_k_weights)
        site = reference.sites[layer]
        comparison = _compare(site, modules[site.name], reference, hidden, top_k_index, top_k_weights, result)
        found.append(comparison)
        on_layer(comparison)
        return result

    engine.run_experts = compared  # type: ignore[method-assign]
    try:
        _forward(model, engine, input_ids)
    finally:
        del engine.run_experts  # the method of the class is back
    return found


def _forward(model: PreTrainedModel, engine: Engine, input_ids: torch.Tensor) -> None:
    cache = engine.new_cache()
    ids = input_ids.to(model.device)
    for _ in range(1 + DECODE_STEPS):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1:].argmax(dim=-1)


def _compare(
    site: ExpertsSite,
    module: Any,
    reference: Reference,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    result: torch.Tensor,
) -> Comparison:
    used = torch.unique(top_k_index).tolist()
    position = torch.zeros(site.experts, dtype=torch.long, device=top_k_index.device)
    position[used] = torch.arange(len(used), device=top_k_index.device)
    theirs = library_result(module, reference.experts[site.layer], used, hidden, position[top_k_index], top_k_weights)
    is_equal = torch.equal(result, theirs)
    difference = 0.0 if is_equal else (result.float() - theirs.float()).abs().nan_to_num(float("inf")).max().item()
    return Comparison(
        layer=site.layer,
        phase="decode" if hidden.shape[0] == 1 else "prefill",
        tokens=hidden.shape[0],
        used=len(used),
        experts=site.experts,
        is_equal=is_equal,
        is_finite=bool(torch.isfinite(theirs).all()),
        largest_difference=difference,
    )
