"""From a model's configuration alone: what it needs, what a budget buys, and the floor of the time per token.

Nothing is downloaded but the config, nothing is loaded: the model's empty shell tells its sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from smoe.config import EngineConfig
from smoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from smoe.memory.dtypes import SAFETENSORS
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import PAGE, page_ceil
from smoe.models.anatomy import Anatomy, examine
from smoe.models.checkpoint import described_checkpoint
from smoe.models.experts import ExpertsSite, find_sites, meta_model
from smoe.models.files import naming
from smoe.models.quantised_linear import PIECE_ELEMENTS
from smoe.models.workspace import workspace_bytes
from smoe.policy.budget import Demand

DEFAULT_CONTEXT_TOKENS = 4096


@dataclass(frozen=True)
class ModelSpec:
    """A model known by its configuration."""

    config: PretrainedConfig
    shell: PreTrainedModel
    """The model on the meta device, experts included."""
    sites: list[ExpertsSite]
    anatomy: Anatomy
    dtype: torch.dtype
    context_tokens: int
    """Positions reserved for every sequence."""
    stored_bytes: Mapping[int, int] | None = None
    """An expert of every layer, where they are quantised and stay so; None: they are of the model's dtype."""
    dense: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Weights beside the experts that are quantised and stay so, by the library's names."""

    @property
    def weights_bytes(self) -> int:
        """Everything but the routed experts, as it is kept; tied weights once."""
        weights = dict(self.shell.named_parameters())
        plain: int = sum(weights[name].numel() for name in self.dense) * self.dtype.itemsize
        return self.anatomy.weights_bytes - plain + sum(stored.nbytes for stored in self.dense.values())

    @property
    def expert_bytes(self) -> int:
        """The largest routed expert."""
        return max(map(self._expert_bytes, self.sites))

    @property
    def experts_bytes(self) -> int:
        """All routed experts together."""
        return sum(site.experts * self._expert_bytes(site) for site in self.sites)

    @property
    def expert_bytes_per_token(self) -> int:
        """Routed experts that one token uses."""
        return sum(self.anatomy.top_k[site.layer] * self._expert_bytes(site) for site in self.sites)

    @property
    def unpacked_bytes(self) -> int:
        """Room for what is unpacked at a time of quantised weights, in the model's dtype."""
        largest = max(math.prod(part.shape) for site in self.sites for part in site.parts)
        elements = (0 if self.stored_bytes is None else largest) + (PIECE_ELEMENTS if self.dense else 0)
        return elements * self.dtype.itemsize

    def _expert_bytes(self, site: ExpertsSite) -> int:
        if self.stored_bytes is not None:
            return self.stored_bytes[site.layer]
        return sum(math.prod(part.shape) for part in site.parts) * self.dtype.itemsize

    def demand(self, config: EngineConfig, slot_bytes: int | None = None, read_buffer_bytes: int = 0) -> Demand:
        """What the model asks of the budget; without `slot_bytes`, with the largest alignment a slot may need."""
        tokens = min(config.prefill_tokens, self.context_tokens * config.max_sequences)
        text = self.config.get_text_config()
        item = self.dtype.itemsize
        widest = max(max(weight.shape, default=0) for weight in self.shell.parameters())
        return Demand(
            weights_bytes=self.weights_bytes,
            workspace_bytes=workspace_bytes(
                text, self.sites, self.anatomy.top_k, tokens, config.max_sequences, item, self.experts_bytes, widest
            )
            + self.unpacked_bytes,
            kv_cache_bytes=self.anatomy.kv_bytes_per_token * self.context_tokens * config.max_sequences
            + self.anatomy.state_bytes_per_sequence * config.max_sequences,
            slot_bytes=slot_bytes or page_ceil(self.expert_bytes) + PAGE,
            top_k=max(self.anatomy.top_k.values()),
            total_experts=sum(site.experts for site in self.sites),
            read_buffer_bytes=read_buffer_bytes,
        )


def read_spec(model: str | Path, config: EngineConfig, revision: str | None = None) -> ModelSpec:
    """Read a model's configuration and look at its empty shell."""
    checkpoint = described_checkpoint(model, revision)
    path, model_config = checkpoint.config_place, checkpoint.config()
    _refuse_quantised(model_config)
    with naming(f"{path} describes no model that can be built"):
        context_tokens = choose_context(model_config, config)
        dtype = choose_dtype(model_config, config)
        shell = meta_model(model_config, dtype)
    sites = find_sites(shell)
    unclear = f"the structure of {model_config.model_type!r} could not be followed by {path}, so it is refused"
    with naming(unclear, UnsupportedModelError):
        anatomy = examine(shell, sites, dtype)
    _check_anatomy(anatomy, sites, path)
    spec = ModelSpec(model_config, shell, sites, anatomy, dtype, context_tokens)
    dense = checkpoint.quantised_dense(spec) if config.dense_precision == "as-stored" else {}
    return replace(spec, stored_bytes=checkpoint.quantised_bytes(spec), dense=dense)


def choose_dtype(model_config: PretrainedConfig, config: EngineConfig) -> torch.dtype:
    """The element type asked for, else the checkpoint's own."""
    if config.dtype != "auto":
        named: torch.dtype = getattr(torch, config.dtype)  # checked with the configuration
        return named
    own: Any = getattr(model_config.get_text_config(), "dtype", None) or getattr(model_config, "dtype", None)
    if own is not None and not isinstance(own, (str, torch.dtype)):
        raise CheckpointError(f"config.json: 'dtype' is {own!r:.80}, it must be the name of a type, as \"bfloat16\"")
    own = getattr(torch, own) if isinstance(own, str) else own
    return own if own in SAFETENSORS else torch.bfloat16


def _refuse_quantised(model_config: PretrainedConfig) -> None:
    quantisation = getattr(model_config, "quantization_config", None)
    if quantisation is not None:
        method = (
            quantisation.get("quant_method", "?") if isinstance(quantisation, dict) else type(quantisation).__name__
        )
        raise UnsupportedModelError(
            f"the checkpoint is quantised ({method}); smoe reads bf16, fp16 and fp32 checkpoints so far: "
            "take the unquantised release of the model"
        )


def choose_context(model_config: PretrainedConfig, config: EngineConfig) -> int:
    """The positions asked for, else `DEFAULT_CONTEXT_TOKENS` or the model's own limit; raises beyond that limit."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) else None
    if config.context_tokens is None:
        return min(DEFAULT_CONTEXT_TOKENS, limit or DEFAULT_CONTEXT_TOKENS)
    if limit is not None and config.context_tokens > limit:
        raise ConfigError(
            f"`context_tokens` {config.context_tokens} is more than the {limit} positions the model was made for by "
            f"its config.json; give at most {limit}",
            setting="context_tokens",
            given=config.context_tokens,
            allowed=f"a whole number from 1 to {limit}",
        )
    return config.context_tokens


def _check_anatomy(anatomy: Anatomy, sites: list[ExpertsSite], path: Path) -> None:
    """Raise `CheckpointError` where a token would use no experts, or more than there are."""
    for site in sites:
        top_k = anatomy.top_k.get(site.layer)
        if top_k is None or not 1 <= top_k <= site.experts:
            raise CheckpointError(
                f"{path}: a token would use {top_k} of {site.experts} experts in layer {site.layer}; download it again"
            )
