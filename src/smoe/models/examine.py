"""Finds routers, experts and cache shapes of a model by running it once without weights (on torch's meta device).

The search follows the data, not names. The router of a layer is the module whose output contains the very tensor that
the experts receive as `top_k_index`. The shapes of the KV cache are those that the attention layers write. New families
of transformers are covered if they run without data. Rotary embeddings that read the values of positions compute on
real tensors. Sparse attention that lists the positions where a mask is set (torch's `nonzero`) gets all positions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # meta tensors import it later; here it counts as a library
from torch import nn
from torch.fx.experimental import _config as meta_tensors
from transformers import DynamicCache, PreTrainedModel

from smoe.models.outline import Anatomy, Buffer, ExpertsSite, Outline, Weight
from smoe.models.quantised_linear import can_stay_quantised
from smoe.models.rotary import rotary_modules

_PROBE_TOKENS = 2


def outline_of(model: PreTrainedModel, sites: list[ExpertsSite], anatomy: Anatomy, dtype: torch.dtype) -> Outline:
    """Return the outline of a model on the meta device that has its experts."""
    return Outline(
        weights=_weights(model, dtype),
        buffers=_buffers(model),
        sites=sites,
        anatomy=anatomy,
        embedding=_embedding(model),
        tied=dict(model.all_tied_weights_keys),
        optional="|".join(model._keys_to_ignore_on_load_missing or ()),
        tables=frozenset(_tables(model)),
    )


def examine(model: PreTrainedModel, sites: list[ExpertsSite], dtype: torch.dtype) -> Anatomy:
    """Return the routers and cache sizes of `model`, which is on the meta device and has its experts. It is run on two
    tokens."""
    notes = _Notes()
    cache = DynamicCache(config=model.config)
    all_set = meta_tensors.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with _watched(model, sites, notes), _real_rotary_embeddings(model), all_set, torch.no_grad():
        ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device="meta")
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    names = {module: name for name, module in model.named_modules()}
    per_token, fixed = _cache_bytes(cache, dtype)
    return Anatomy(
        kv_bytes_per_token=per_token,
        state_bytes_per_sequence=fixed,
        routers={layer: names[module] for layer, module in notes.routers.items()},
        gates={layer: names[module] for layer, module in notes.routers.items() if module in notes.plain},
        top_k=notes.top_k,
    )


class _Notes:
    def __init__(self) -> None:
        self.outputs: list[tuple[nn.Module, tuple[Any, ...]]] = []
        self.routers: dict[int, nn.Module] = {}
        self.plain: set[nn.Module] = set()
        """Modules that were called with a single tensor and no other argument."""
        self.top_k: dict[int, int] = {}


@contextmanager
def _watched(model: PreTrainedModel, sites: list[ExpertsSite], notes: _Notes) -> Iterator[None]:
    """During the `with` block, record the outputs of all modules that return tuples. Experts return zeros and record
    which index tensor they received."""
    hooks = [module.register_forward_hook(_note_output(notes), with_kwargs=True) for module in model.modules()]
    modules = dict(model.named_modules())
    try:
        for site in sites:
            modules[site.name].forward = _probe_experts(site.layer, notes)  # type: ignore[method-assign]
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for site in sites:
            del modules[site.name].forward


@contextmanager
def _real_rotary_embeddings(model: PreTrainedModel) -> Iterator[None]:
    """During the `with` block, rotary embeddings that read the values of positions compute on real tensors, because
    meta tensors have no values."""
    modules = [module for module, _ in rotary_modules(model)]
    try:
        for module in modules:
            module.forward = _on_real_tensors(type(module)(module.config))
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def _on_real_tensors(real: nn.Module) -> Callable[..., Any]:
    """Return a forward function for meta tensors that calls `real`, a rotary embedding in main memory. All positions
    are 0, because only the shapes of the results matter."""

    def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        like, positions = torch.empty(0, dtype=x.dtype), torch.zeros(position_ids.shape, dtype=torch.long)
        turned = real(like, positions, *args, **kwargs)
        is_one = isinstance(turned, torch.Tensor)
        return turned.to("meta") if is_one else tuple(each.to("meta") for each in turned)

    return forward


def _note_output(notes: _Notes) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, tuple):
            notes.outputs.append((module, output))
            if len(args) == 1 and not kwargs:
                notes.plain.add(module)

    return hook


def _probe_experts(layer: int, notes: _Notes) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        notes.top_k[layer] = top_k_index.shape[-1]
        for module, output in reversed(notes.outputs):
            if any(value is top_k_index for value in output):
                notes.routers[layer] = module
                break
        notes.outputs.clear()
        return torch.zeros_like(hidden_states)

    return forward


def _cache_bytes(cache: DynamicCache, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that a KV cache takes per token and the bytes of recurrent state per sequence, for one row of
    the batch."""
    per_token = fixed = 0
    for layer in cache.layers:
        for name, value in vars(layer).items():
            for tensor in _tensors(value):
                item = dtype.itemsize if tensor.is_floating_point() else tensor.element_size()
                size = tensor.numel() * (4 if "recurrent" in name else item)
                if name in ("keys", "values", "indexer_keys", "indexer_position_ids"):
                    per_token += size // _PROBE_TOKENS
                else:
                    fixed += size
    return per_token, fixed


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the state tensors (three dimensions or more) in the value of one attribute of a cache layer."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor) and tensor.dim() >= 3]


def _weights(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Weight]:
    """Return all parameters of a model by name; tied parameters occur once."""
    wide = "|".join(model._get_dtype_plan(dtype)) or "$^"  # names that transformers' loader leaves in float32
    found = {}
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        is_wide = parameter.dtype == torch.float32 or re.search(rf"(^|\.)({wide})($|\.)", name) is not None
        found[name] = Weight(
            tuple(parameter.shape),
            is_linear=isinstance(module, nn.Linear),
            is_plain=can_stay_quantised(module),
            is_wide=is_wide and dtype != torch.float32,
        )
    return found


def _buffers(model: PreTrainedModel) -> dict[str, Buffer]:
    saved = model.state_dict().keys()
    return {
        name: Buffer(tuple(each.shape), max(4, each.element_size()), name in saved)
        for name, each in model.named_buffers()
    }


def _tables(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of the embeddings that have more rows than the vocabulary has tokens."""
    tokens, inputs = model.config.get_text_config().vocab_size, model.get_input_embeddings()
    for path, module in model.named_modules():
        if type(module) is nn.Embedding and module.num_embeddings > tokens and module is not inputs:
            yield f"{path}.weight"


def _embedding(model: PreTrainedModel) -> str | None:
    """Return the name of the input embedding, or None if it is also the output matrix."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or output is None or embedding.weight is output.weight:
        return None
    return next(str(name) for name, weight in model.named_parameters() if weight is embedding.weight)
