"""Connects the engine to a transformers model by setting attributes of the model object.

* The `forward` of every experts module calls the engine.
* The model's `forward` opens a pass (turn, positions, phase, padding) and checks that the KV cache is one of ours.
* The model's `generate` takes a turn, reads long prompts in chunks, and notes which rows have ended.
* Operations that would damage the model raise an error (`guards.py`).

Faster code with the same bits replaces single modules (`fastpath/linear.py`, `fastpath/attention.py`). The class of the
model, its config, its tokenizer, its chat template and everything based on `generate` are unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from smoe.errors import EngineStateError
from smoe.models.ended_rows import EndedRows
from smoe.models.guards import guard, refuse_gradients, uncompiled, without_backward
from smoe.models.kv_cache import RowCache
from smoe.models.outline import ExpertsSite
from smoe.models.scoring import in_order
from smoe.runtime.cancellation import Cancellation
from smoe.runtime.engine import Engine
from smoe.runtime.passes import Passes


def attach(model: PreTrainedModel, sites: list[ExpertsSite], engine: Engine, listen: Mapping[int, str]) -> None:
    """Connect the engine to `model` in place; `model.offload` is the engine afterwards.

    `sites`: the experts modules; `listen`: by layer, the paths of the routers whose logits the engine needs.
    """
    observe_routers(model, engine, listen)
    modules = dict(model.named_modules())
    for site in sites:
        modules[site.name].forward = _experts_forward(engine.passes, site.layer)  # type: ignore[method-assign]
    ended = EndedRows()
    model.forward = uncompiled(_model_forward(model, engine))  # type: ignore[method-assign]
    model.generate = _generate(model, engine, ended)  # type: ignore[method-assign]
    model._prepare_cache_for_generation = _prepare_cache(engine, ended)  # type: ignore[method-assign]
    model._get_stopping_criteria = ended.listening(model._get_stopping_criteria)  # type: ignore[method-assign]
    model.offload = engine  # type: ignore[assignment]
    guard(model)


def observe_routers(model: PreTrainedModel, engine: Engine, listen: Mapping[int, str]) -> list[RemovableHandle]:
    """Pass the logits of routers to the engine. `listen`: the routers' paths by layer. Return the hooks; removing them
    ends the passing."""
    modules = dict(model.named_modules())
    return [modules[name].register_forward_hook(_note_logits(engine, layer)) for layer, name in listen.items()]


@contextmanager
def observed_routers(model: PreTrainedModel, engine: Engine) -> Iterator[None]:
    """Pass the logits of every router to the engine during the `with` block. (Routers with a scoring rule always pass
    theirs.)"""
    without_rules = {layer: path for layer, path in engine.anatomy.routers.items() if layer not in engine.rules}
    hooks = observe_routers(model, engine, without_rules)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _note_logits(engine: Engine, layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        engine.passes.note_logits(layer, in_order(output)[0])

    return hook


def _experts_forward(passes: Passes, layer: int) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return passes.run_experts(layer, hidden_states, top_k_index, top_k_weights)

    return forward


def _model_forward(model: PreTrainedModel, engine: Engine) -> Callable[..., Any]:
    original = model.forward
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(names, args, strict=False))
        given = kwargs.get("input_ids")
        given = kwargs.get("inputs_embeds") if given is None else given
        if given is None:
            return original(**kwargs)  # the library's error names the missing argument
        with engine.passes.turn():  # before a cache is made: the thread with the turn has the budget
            refuse_gradients(model, given)
            cache = _our_cache(kwargs, engine, model, given.shape[0])
            with engine.passes.forward_pass(given, _padding(kwargs.get("attention_mask"), given.shape[1]), cache):
                output = original(**kwargs)
        return without_backward(output)

    return forward


def _our_cache(kwargs: dict[str, Any], engine: Engine, model: PreTrainedModel, rows: int) -> RowCache | None:
    """Return the KV cache of this pass: the caller's, or a new one if the library would make one; None without a cache.
    Raise `EngineStateError` if the caller's cache is not one of ours."""
    cache = kwargs.get("past_key_values")
    use_cache = kwargs.get("use_cache")
    if cache is None and (getattr(model.config, "use_cache", False) if use_cache is None else use_cache):
        cache = kwargs["past_key_values"] = engine.new_cache(rows)
    if cache is not None and not isinstance(cache, RowCache):
        raise EngineStateError(
            f"the given {type(cache).__name__} is outside the memory budget; pass no cache, or a cache from "
            "model.offload.new_cache()"
        )
    return cache


def _padding(attention_mask: Any, tokens: int) -> torch.Tensor | None:
    """Return [rows, tokens], True at padding; None if the attention mask shows no padding."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        return None
    padding = attention_mask[:, -tokens:] == 0
    return padding if bool(padding.any()) else None


def _generate(model: PreTrainedModel, engine: Engine, ended: EndedRows) -> Callable[..., Any]:
    original = model.generate

    @functools.wraps(original)
    def generate(inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        if isinstance(prompt, torch.Tensor) and prompt.dim() == 2:
            chunk = max(1, engine.config.prefill_tokens // prompt.shape[0])  # as planned for the workspace
            if prompt.shape[1] > chunk:
                kwargs.setdefault("prefill_chunk_size", chunk)
        whole = _lengths(prompt, kwargs.get("attention_mask"))
        criteria = kwargs.get("stopping_criteria", args[2] if len(args) > 2 else None)
        cancellations = [each for each in criteria or () if isinstance(each, Cancellation)]
        with (
            engine.passes.turn(cancellations),
            ended.observed(is_plain=kwargs.get("custom_generate") is None),
            engine.rotary.reading(whole),
        ):
            return original(inputs, *args, **kwargs)

    return generate


def _lengths(prompt: Any, attention_mask: Any) -> list[int]:
    """Return for every row of a prompt the number of tokens without padding. The list is empty if the prompt is not
    token ids."""
    if not isinstance(prompt, torch.Tensor) or prompt.dim() != 2:
        return []
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        return [int(tokens) for tokens in attention_mask.sum(dim=1).tolist()]
    return [prompt.shape[1]] * prompt.shape[0]


def _prepare_cache(engine: Engine, ended: EndedRows) -> Callable[..., None]:
    def prepare(
        generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        if generation_config.use_cache is False:
            return
        cache = model_kwargs.get("past_key_values")
        if cache is None:
            copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            cache = model_kwargs["past_key_values"] = engine.new_cache(batch_size * copies)
            ended.note_cache(cache, generation_config, mode)
        if isinstance(cache, RowCache):  # the model's forward refuses caches of other classes
            cache.check_room(max_cache_length)

    return prepare


def original_experts_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Return the library's eager `forward` of an experts module, without the decorator that dispatches to other
    implementations."""
    forward = type(module).forward
    return functools.partial(getattr(forward, "__wrapped__", forward), module)
