"""From a model's files to its `ModelSpec`: the configuration alone is read, and the model's empty shell looked at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from smoe.config import EngineConfig
from smoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from smoe.expert import LOW
from smoe.models.anatomy import Anatomy, examine
from smoe.models.checkpoint import Checkpoint, described_checkpoint
from smoe.models.experts import ExpertsSite, find_sites, meta_model
from smoe.models.files import naming
from smoe.models.rotary import position_limit
from smoe.models.spec import ModelSpec, own_dtype
from smoe.models.tied_weights import separate
from smoe.units import format_bytes

DEFAULT_CONTEXT_TOKENS = 4096


def read_spec(model: str | Path, config: EngineConfig, revision: str | None = None) -> ModelSpec:
    """Read a model's configuration and look at its empty shell."""
    checkpoint = described_checkpoint(model, revision)
    path, model_config = checkpoint.config_place, checkpoint.config()
    _refuse_quantised(model_config, path)
    with naming(f"{path} describes no model that can be built"):
        context_tokens = choose_context(model_config, config)
        own, dtype = own_dtype(model_config), choose_dtype(model_config, config)
        shell = meta_model(model_config, dtype)
    separate(shell, checkpoint.stored_apart(shell, dtype))
    sites = find_sites(shell)
    unclear = f"the structure of {model_config.model_type!r} could not be followed by {path}, so it is refused"
    with naming(unclear, UnsupportedModelError):
        anatomy = examine(shell, sites, dtype)
    _check_anatomy(anatomy, sites, path)
    spec = ModelSpec(model_config, shell, sites, anatomy, dtype, own, context_tokens, config.precision)
    dense = checkpoint.quantised_dense(spec) if config.dense_precision == "as-stored" else {}
    spec = with_experts_of(replace(spec, dense=dense), checkpoint, config)
    spec = replace(spec, files=checkpoint.file_bytes(spec))
    return replace(spec, doubts=checkpoint.doubts(spec))


def with_experts_of(spec: ModelSpec, checkpoint: Checkpoint, config: EngineConfig) -> ModelSpec:
    """The same model with its experts, and their low copies, in the precisions of a configuration. Raises `ConfigError`
    for those that it cannot have."""
    spec = replace(spec, precision=config.precision, low=None)
    spec = replace(spec, stored_bytes=checkpoint.quantised_bytes(spec))
    return replace(spec, low=_low_copies(spec, checkpoint, config)) if config.has_low else spec


def _low_copies(spec: ModelSpec, checkpoint: Checkpoint, config: EngineConfig) -> ModelSpec:
    """The model with its experts' low copies; raises `ConfigError` where they would not be smaller."""
    low = replace(spec, precision=config.low_precision, form=LOW)
    low = replace(low, stored_bytes=checkpoint.quantised_bytes(low))
    if low.expert_bytes >= spec.expert_bytes:
        raise ConfigError(
            f"`low_precision` {config.low_precision}: a low copy would take {format_bytes(low.expert_bytes)}, and the "
            f"experts take {format_bytes(spec.expert_bytes)} as they are; give a lower one, or none",
            setting="low_precision",
            given=config.low_precision,
            allowed="a precision of fewer bits than the experts have",
        )
    return low


def spec_of_whole(checkpoint: Checkpoint, spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """`spec` for a checkpoint whose weights are here: where quantised ones lie, which it says, may have been read from
    copies of nothing but headers, and only the files say whether weights that may be shared are stored apart."""
    return read_spec(checkpoint.place, config) if spec.dense or spec.shell.all_tied_weights_keys else spec


def choose_dtype(model_config: PretrainedConfig, config: EngineConfig) -> torch.dtype:
    """The element type asked for, else the checkpoint's own."""
    if config.dtype != "auto":
        named: torch.dtype = getattr(torch, config.dtype)  # checked with the configuration
        return named
    return own_dtype(model_config)


def _refuse_quantised(model_config: PretrainedConfig, path: Path) -> None:
    both = (model_config, model_config.get_text_config())
    found = (getattr(each, "quantization_config", None) for each in both)
    quantisation = next((each for each in found if each is not None), None)
    if quantisation is not None:
        method = (
            quantisation.get("quant_method", "?") if isinstance(quantisation, dict) else type(quantisation).__name__
        )
        raise UnsupportedModelError(
            f"{path}: the checkpoint is quantised ({method!s:.80}), {model_config.model_type!r}; smoe reads bf16, fp16 "
            "and fp32 checkpoints, fp8, NVFP4, compressed-tensors, GPTQ, AWQ, gpt_oss in mxfp4, and GGUF files: take "
            "one of these releases of the model"
        )


def choose_context(model_config: PretrainedConfig, config: EngineConfig) -> int:
    """The positions asked for, else `DEFAULT_CONTEXT_TOKENS` or the model's own limit; raises beyond that limit."""
    limit = position_limit(model_config)
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
