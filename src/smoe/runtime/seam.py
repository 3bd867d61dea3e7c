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

from smoe.errors import ConfigError, EngineStateError
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
        _check_given(given, "inputs_embeds" if kwargs.get("input_ids") is None else "input_ids")
        with engine.passes.turn():  # before a cache is made: the thread with the turn has the budget
            refuse_gradients(model, given)
            cache = _our_cache(kwargs, engine, model, given.shape[0])
            padding = _padding(kwargs.get("attention_mask"), given.shape[1])
            with engine.passes.forward_pass(given, padding, cache, kwargs.get("pixel_values") is not None):
                output = original(**kwargs)
        return without_backward(output)

    return forward


def _check_given(given: Any, name: str) -> None:
    """Raise `ConfigError` unless a model's input is a tensor of at least one row and one token: transformers fails at
    others somewhere inside the model."""
    shape = tuple(given.shape) if isinstance(given, torch.Tensor) else ()
    if len(shape) < 2 or 0 in shape[:2]:
        what = f"a tensor of shape {list(shape)}" if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
        allowed = "a tensor [rows, tokens, ...] of at least one row and one token"
        message = f"`{name}` is {what}; it must be {allowed}"
        raise ConfigError(message, setting=name, given=what, allowed=allowed)


def _our_cache(kwargs: dict[str, Any], engine: Engine, model: PreTrainedModel, rows: int) -> RowCache | None:
    """Return the KV cache of this pass: the caller's, or a new one if the library would make one; None without a cache.
    Raise `EngineStateError` if the caller's cache is not one of this engine's."""
    cache = kwargs.get("past_key_values")
    use_cache = kwargs.get("use_cache")
    if cache is None and (getattr(model.config, "use_cache", False) if use_cache is None else use_cache):
        cache = kwargs["past_key_values"] = engine.new_cache(rows)
    return None if cache is None else _checked(cache, engine)


def _checked(cache: Any, engine: Engine) -> RowCache:
    """Return the cache if it is one of this engine's. Raise `EngineStateError` for any other."""
    use = "pass no cache, or a cache from new_cache() of this model's own engine, model.offload"
    if not isinstance(cache, RowCache):
        raise EngineStateError(f"the given {type(cache).__name__} is outside the memory budget; {use}")
    if not engine.passes.owns(cache):
        raise EngineStateError(f"the given cache belongs to another model's engine; {use}")
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
        if prompt is not None and kwargs.get("inputs_embeds") is None:
            _check_given(prompt, "inputs" if inputs is not None else "input_ids")
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
        tokens = max_cache_length + 1  # the library leaves out the last new token, which takes no position
        new_tokens = generation_config.max_new_tokens or tokens - _prompt_tokens(model_kwargs, max_cache_length)
        _checked(cache, engine).check_room(tokens - new_tokens, new_tokens)

    return prepare


def _prompt_tokens(model_kwargs: Mapping[str, Any], most: int) -> int:
    """Return the number of tokens, with padding, of the prompt of a `generate` call; `most` if the library passes
    nothing that has this length."""
    given = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))  # no mask without padding
    return next((int(each.shape[-1]) for each in given if isinstance(each, torch.Tensor)), most)


def original_experts_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Return the library's eager `forward` of an experts module, without the decorator that dispatches to other
    implementations."""
    forward = type(module).forward
    return functools.partial(getattr(forward, "__wrapped__", forward), module)
