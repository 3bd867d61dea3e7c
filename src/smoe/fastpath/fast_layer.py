"""The forward function of a decoder layer that our kernels compute: one job for one token, a few calls for several
tokens of one text, and transformers' function for everything else (`decoder_layer.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as all_modules

from smoe.fastpath import attention
from smoe.fastpath.prompt_layer import PromptLayer
from smoe.kernels.token_attention import AttachedRouter, Place, TokenAttention
from smoe.kernels.token_router import TokenRouter
from smoe.models.kv_cache import Positioned, RowCache

ATTENTION, NORM, LAST_NORM = "self_attn", "input_layernorm", "post_attention_layernorm"
"""The names of a layer's modules, except its mlp."""
_FUNCTION = "_attn_implementation_internal"
"""The entry of a config that names the attention function. The property of the config that returns it takes 0.04 ms
after products have emptied the caches."""
_UNDERSTOOD = {"position_ids", "use_cache", "cache_position", "output_router_logits"}
"""Arguments of a layer that do not matter for the tokens of one text with a cache."""

Forward = Callable[..., Any]


def is_row(x: object) -> bool:
    """Return whether `x` is a single contiguous row of bf16 numbers on the CPU."""
    if not isinstance(x, torch.Tensor) or type(x) is not torch.Tensor or x.dtype is not torch.bfloat16:
        return False
    return x.is_cpu and x.numel() == x.shape[-1] and x.is_contiguous()


def hooks_of(modules: Iterable[nn.Module]) -> list[Mapping[int, Any]]:
    """Return the dictionaries that contain the forward hooks of `modules`, and the dictionaries of the hooks that apply
    to all modules."""
    own = [hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]
    return [*own, all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks]


class RoutedBlock(NamedTuple):
    """A layer's mlp module that consists of a router and its experts, and nothing else."""

    block: nn.Module
    gate: nn.Module
    experts: nn.Module
    router: TokenRouter
    """Computes the routing of one token as a part of the layer's job."""


RowExperts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function (residual, experts' input), both [1, 1, H], that returns the layer's output [1, 1, H], computed with the
experts that the layer's router has just chosen."""
ResidentMlp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function (residual, router's and experts' input), both [1, T, H], that returns the layer's output [1, T, H]."""


def _none_resident() -> None:
    return None


class FastLayer:
    """The forward function of a decoder layer. For one token, our kernels compute the layer in one job; for several
    tokens of one text, in a few calls; transformers' function computes every other call."""

    def __init__(self, layer: nn.Module, work: TokenAttention) -> None:
        self.library: Forward = layer.forward
        self.work = work
        self._modules, self._attention = layer._modules, layer.get_submodule(ATTENTION)
        inner = self._attention
        self.index: int = inner.layer_idx  # type: ignore[assignment]
        self._settings = vars(inner.config)
        (self.mlp,) = set(self._modules) - {ATTENTION, NORM, LAST_NORM}
        ours = [(self._modules, name) for name in (ATTENTION, NORM, LAST_NORM)]
        self._parts = [
            (of, name, of[name]) for of, name in (*ours, *((inner._modules, name) for name in inner._modules))
        ]
        self._hooks = hooks_of(module for _, _, module in self._parts if module is not None)
        self.routed: RoutedBlock | None = None
        """The mlp, if its router is part of the job; else None."""
        self._routed_parts: list[tuple[Any, str, object]] = []
        self._routed_hooks: list[Mapping[int, Any]] = []
        self._hooks_before: list[Mapping[int, Any]] = []
        """The hooks that may change, in place, the row that the router takes."""
        self._prompt: PromptLayer | None = None
        self._residents: Callable[[], ResidentMlp | None] = _none_resident

    def read_prompts_by(self, prompt: PromptLayer) -> None:
        """Compute several tokens of one text by `prompt` from now on."""
        self._prompt = prompt

    def compute_residents_by(self, find: Callable[[], ResidentMlp | None]) -> None:
        """Compute the router and the experts of several tokens by the function that `find` returns, from now on. `find`
        is called in every pass; it returns None if the layer's mlp must compute them."""
        self._residents = find

    @property
    def block(self) -> nn.Module:
        """The layer's current mlp module."""
        found = self._modules[self.mlp]
        assert found is not None
        return found

    def route_by(self, routing: AttachedRouter, routed: RoutedBlock) -> None:
        """Make the router of the mlp `routed` a part of the layer's job."""
        self.work.route_by(routing)
        self.routed = routed
        inner = [(routed.block._modules, name, child) for name, child in routed.block.named_children()]
        weights = routed.gate._parameters
        self._routed_parts = [(self._modules, self.mlp, routed.block), *inner, (weights, "weight", weights["weight"])]
        self._routed_hooks = hooks_of([routed.block, *(child for _, _, child in inner)])
        modules = (routed.block, routed.gate)
        self._hooks_before = [all_modules._global_forward_pre_hooks, *(each._forward_pre_hooks for each in modules)]

    def may_skip_block(self) -> bool:
        """Return whether the layer's mlp, its router and its experts were neither replaced nor given a hook, so that
        their forward functions need not be called."""
        if self.routed is None or "forward" in vars(self.routed.block):
            return False
        is_same = all(of[name] is part for of, name, part in self._routed_parts)
        return is_same and not any(self._routed_hooks)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the layer's output as transformers' forward function does. Arguments after the hidden states must be
        passed by name, as models do."""
        if self.is_sdpa and self.is_untouched() and kwargs.keys() <= _UNDERSTOOD:
            place = self.place(hidden_states, position_embeddings, past_key_values) if attention_mask is None else None
            if place is not None:
                return self.one_token(hidden_states, position_embeddings, place)
            if self._prompt is not None:
                place = self._prompt.place(hidden_states, attention_mask, position_embeddings, past_key_values)
                if place is not None:
                    return self.several_tokens(self._prompt, hidden_states, position_embeddings, place)
        given = {"attention_mask": attention_mask, "past_key_values": past_key_values, **kwargs}
        return self.library(hidden_states, position_embeddings=position_embeddings, **given)

    def one_token(
        self,
        hidden: torch.Tensor,
        embeddings: tuple[torch.Tensor, torch.Tensor],
        place: Place,
        experts: RowExperts | None = None,
    ) -> torch.Tensor:
        """Return the layer's output [1, 1, H] for one token `hidden` [1, 1, H]. `place`: where the token's keys and
        values are written. `experts`: a function that computes the experts in place of the mlp, which requires
        `may_skip_block`."""
        after, normed = self.work(hidden, *embeddings, place)
        if experts is not None:
            return experts(after, normed)
        router = None if self.routed is None else self.routed.router
        try:
            if router is not None and not any(self._hooks_before):
                router.use_for(normed.data_ptr())  # lets the router's forward function find the result for this row
            output = self.block(normed)
        finally:
            if router is not None:
                router.use_for(0)
        given: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return after + given

    def several_tokens(
        self,
        prompt: PromptLayer,
        hidden: torch.Tensor,
        embeddings: tuple[torch.Tensor, torch.Tensor],
        place: Place,
    ) -> torch.Tensor:
        """Return the layer's output [1, T, H] for several tokens `hidden` [1, T, H]. `place`: where the keys and values
        of the first one are written."""
        after, normed = prompt(hidden, embeddings, place)
        experts = self._residents() if self.may_skip_block() else None
        if experts is not None:
            return experts(after, normed)
        output = self.block(normed)
        given: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return after + given

    @property
    def is_sdpa(self) -> bool:
        """Whether the model still uses the attention function with which our method was compared."""
        return bool(self._settings.get(_FUNCTION) == attention.NAME)

    def is_untouched(self) -> bool:
        """Return whether all modules of the layer are still the tested ones, and none of them has a hook."""
        return (
            not any(self._hooks)
            and not self._attention.training
            and "forward" not in vars(self._attention)
            and all(modules[name] is module for modules, name, module in self._parts)
        )

    def place(self, hidden: torch.Tensor, embeddings: Any, cache: Any) -> Place | None:
        """Return the storage in the KV cache for the keys and values of a token. Return None if the call is not for a
        single token in the way that was tested."""
        if not is_row(hidden) or not isinstance(cache, RowCache) or cache.rows != 1 or cache.row_lengths is not None:
            return None
        if hidden.requires_grad or not (isinstance(embeddings, tuple) and all(map(is_row, embeddings))):
            return None
        return self.place_in(cache)

    def place_in(self, cache: RowCache) -> Place | None:
        """Return the storage in the KV cache `cache` for the keys and values of its next position. Return None if the
        layer cannot write there."""
        layer = cache.layers[self.index]
        found = layer.place() if isinstance(layer, Positioned) else None
        return None if found is None else Place(*found)
