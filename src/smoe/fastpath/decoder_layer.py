"""Computes one token through a decoder layer, everything except its experts, in one kernel call, a job
(`kernels/token_attention.py`).

    h = x + attention(norm(x))      one job, which also computes the second norm
    y = h + mlp(norm(h))            the mlp is transformers', with our experts

A layer of this structure is recognized by the names of its modules and tested: with a KV cache of a few positions and a
stub for the mlp, our method and transformers' must compute the same bits. Several tokens of one text take a method of
their own (`prompt_layer.py`). transformers computes everything else: other layers, several texts, masks that hide more
than later tokens, modules with hooks, and replaced modules (adapters).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as all_modules
from transformers import PreTrainedModel

from smoe.fastpath import attention
from smoe.fastpath.layer_proof import PROOF_POSITIONS, Embeddings, agrees, agrees_on_prompts
from smoe.fastpath.prompt_layer import PromptLayer
from smoe.kernels.matrix import Matrix
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.token_attention import AttachedRouter, Norm, Parts, Place, Projection, Scratch, TokenAttention, fits
from smoe.kernels.token_router import TokenRouter
from smoe.kernels.verdicts import Verdicts
from smoe.models.kv_cache import Positioned, RowCache
from smoe.models.quantised_linear import QuantisedLinear

_ATTENTION, _NORM, _LAST_NORM = "self_attn", "input_layernorm", "post_attention_layernorm"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_PROMPTS = "prompt in a decoder layer"
_UNDERSTOOD = {"position_ids", "use_cache", "cache_position", "output_router_logits"}
"""Arguments of a layer that do not matter for the tokens of one text with a cache."""

Forward = Callable[..., Any]


def speed_up(
    model: PreTrainedModel,
    pool: SpinningPool,
    linears: Mapping[nn.Module, int],
    norms: Mapping[nn.Module, float],
    verdicts: Verdicts | None = None,
) -> dict[nn.Module, OneToken]:
    """Replace the forward function of every decoder layer whose bits our kernels reproduce, for calls with one token.
    Return the layers with their new functions.

    `linears`: the bf16 layers that our kernels multiply, with their `Product.part`. `norms`: the RMSNorms that our
    kernels compute, with their epsilons. `verdicts`: known results of proofs; this function adds its own. Takes some
    ten milliseconds for every distinct kind of layer.
    """
    embeddings = _embeddings(model)
    if embeddings is None:
        return {}
    scratch, verdicts, found = Scratch(), verdicts or Verdicts(), dict[nn.Module, OneToken]()
    for layer in model.modules():
        parts = _parts(layer, linears, norms, embeddings.cos.shape[-1])
        if parts is None:
            continue
        scratch.reserve(parts)
        ours = OneToken(layer, TokenAttention(pool, parts, scratch))
        subject = _kind(layer, parts), pool.kind
        if verdicts.of("decoder layer", subject, partial(agrees, model, layer, ours, embeddings)):
            layer.forward = ours.forward  # type: ignore[method-assign]
            found[layer] = ours
            _speed_up_prompts(model, layer, ours, embeddings, pool, partial(verdicts.of, _PROMPTS, subject))
    for one, following in itertools.pairwise(found.values()):
        one.work.fetch_for(following.work)
    return found


def _speed_up_prompts(
    model: PreTrainedModel,
    layer: nn.Module,
    ours: OneToken,
    embeddings: Embeddings,
    pool: SpinningPool,
    verdict: Callable[[Callable[[], bool]], bool],
) -> None:
    """Make a decoder layer compute several tokens of one text by our method, if our kernel computes their attention and
    the bits are those of transformers. `verdict`: returns the result of a test, which may be known."""
    first, own, last = (layer.get_submodule(name) for name in (_NORM, _ATTENTION, _LAST_NORM))
    if attention.prompt_kernel_of(own) is None:
        return
    prompt = PromptLayer(first, own, last, ours.work.parts, pool)
    if verdict(partial(agrees_on_prompts, model, layer, ours, prompt, embeddings)):
        ours.read_prompts_by(prompt)


def projections(model: nn.Module) -> set[nn.Module]:
    """Return the projections of all attentions that have our kernel. They are computed within one job, so their
    individual speed does not matter."""
    attentions = [module for module in model.modules() if attention.kernel_of(module) is not None]
    return {child for module in attentions for name, child in module.named_children() if name in _PROJECTIONS}


def _embeddings(model: PreTrainedModel) -> Embeddings | None:
    """Return the outputs of the model's rotary embedding for some position. Return None if the model has no rotary
    embedding, several, or one of another kind."""
    rotary = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
    if len(rotary) != 1:
        return None
    hidden, position = torch.zeros(1, 1, model.config.get_text_config().hidden_size), torch.tensor([[PROOF_POSITIONS]])
    try:
        found = rotary[0](hidden.bfloat16(), position)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # the module has another signature
        return None
    is_known = isinstance(found, tuple) and len(found) == 2 and all(map(_is_row, found)) and found[0].dim() == 3
    return Embeddings(*found) if is_known else None


def _is_row(x: object) -> bool:
    """Return whether `x` is a single contiguous row of bf16 numbers on the CPU."""
    if not isinstance(x, torch.Tensor) or type(x) is not torch.Tensor or x.dtype is not torch.bfloat16:
        return False
    return x.is_cpu and x.numel() == x.shape[-1] and x.is_contiguous()


def _parts(
    layer: nn.Module, linears: Mapping[nn.Module, int], norms: Mapping[nn.Module, float], rotary: int
) -> Parts | None:
    """Return the modules of a decoder layer as arguments for the layer's job. Return None if the layer has other
    modules, or if our kernels do not compute one of its modules."""
    names = dict(layer.named_children())
    if not {_ATTENTION, _NORM, _LAST_NORM} < set(names) or len(names) != 4 or "forward" in vars(layer):
        return None
    own = names[_ATTENTION]
    kernel, scale, inner = attention.kernel_of(own), getattr(own, "scaling", None), dict(own.named_children())
    has_more = not set(_PROJECTIONS) <= set(inner) <= {*_PROJECTIONS, *_HEAD_NORMS} or own._parameters
    if kernel is None or has_more or not isinstance(scale, float):
        return None
    projections = [_projection(inner[name], linears) for name in _PROJECTIONS]
    first, last = (_norm(names[name], norms) for name in (_NORM, _LAST_NORM))
    of_q, of_k = (_norm(inner[name], norms) if name in inner else None for name in _HEAD_NORMS)
    q, k, v, o = projections
    if not (q and k and v and o and first and last):
        return None
    if any(name in inner and each is None for name, each in zip(_HEAD_NORMS, (of_q, of_k), strict=True)):
        return None
    found = Parts(first, q, k, v, o, last, of_q, of_k, *kernel.shape, rotary, scale)
    return found if fits(found) else None


def _projection(module: nn.Module, linears: Mapping[nn.Module, int]) -> Projection | None:
    bias = None if module._parameters.get("bias") is None else _address(module._parameters, "bias")
    if isinstance(module, QuantisedLinear) and module.pool is not None and module.is_in_order:
        return Projection(module.matrix, _address(module._buffers, "codes"), module.codes.nbytes, bias)
    if module in linears:
        weight = module.get_parameter("weight")
        matrix = Matrix(weight.data_ptr(), *weight.shape)
        return Projection(matrix, _address(module._parameters, "weight"), weight.nbytes, bias, linears[module])
    return None


def _norm(module: nn.Module, norms: Mapping[nn.Module, float]) -> Norm | None:
    if module not in norms:
        return None
    return Norm(_address(module._parameters, "weight"), module.get_parameter("weight").numel(), norms[module])


def _address(tensors: Mapping[str, torch.Tensor | None], name: str) -> Callable[[], int]:
    """Return a function that returns the current address of a module's tensor. (Assigning a new tensor to the module
    changes the address.)"""
    return lambda: tensors[name].data_ptr()  # type: ignore[union-attr]


def _kind(layer: nn.Module, parts: Parts) -> tuple[object, ...]:
    """Return a value that is equal for two decoder layers that differ only in the values of their weights."""
    own = layer.get_submodule(_ATTENTION)
    modules = (own.get_submodule(name) for name in _PROJECTIONS)
    projections = [
        (each.outputs, each.columns, _form(module), each.bias is not None, each.part)
        for each, module in zip((parts.q, parts.k, parts.v, parts.o), modules, strict=True)
    ]
    norms = [each and (each.size, each.eps) for each in (parts.norm, parts.last_norm, parts.q_norm)]
    return type(layer), type(own), *projections, *norms, parts[8:]


def _form(module: nn.Module) -> tuple[str, str] | None:
    """Return the format of a quantized layer and the type in which it multiplies rows; None for other layers."""
    return (module.form.name, module.activations) if isinstance(module, QuantisedLinear) else None


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


class OneToken:
    """The forward function of a decoder layer. For one token, our kernels compute the layer in one job; for several
    tokens of one text, in a few calls; transformers' function computes every other call."""

    def __init__(self, layer: nn.Module, work: TokenAttention) -> None:
        self.library: Forward = layer.forward
        self.work = work
        self._modules, self._attention = layer._modules, layer.get_submodule(_ATTENTION)
        inner = self._attention
        self.index: int = inner.layer_idx  # type: ignore[assignment]
        (self.mlp,) = set(self._modules) - {_ATTENTION, _NORM, _LAST_NORM}
        ours = [(self._modules, name) for name in (_ATTENTION, _NORM, _LAST_NORM)]
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

    def read_prompts_by(self, prompt: PromptLayer) -> None:
        """Compute several tokens of one text by `prompt` from now on."""
        self._prompt = prompt

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
        output = self.block(normed)
        given: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return after + given

    @property
    def is_sdpa(self) -> bool:
        """Whether the model still uses the attention function with which our method was compared."""
        return bool(self._attention.config._attn_implementation == attention.NAME)  # type: ignore[union-attr]

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
        if not _is_row(hidden) or not isinstance(cache, RowCache) or cache.rows != 1 or cache.row_lengths is not None:
            return None
        if hidden.requires_grad or not (isinstance(embeddings, tuple) and all(map(_is_row, embeddings))):
            return None
        return self.place_in(cache)

    def place_in(self, cache: RowCache) -> Place | None:
        """Return the storage in the KV cache `cache` for the keys and values of its next position. Return None if the
        layer cannot write there."""
        layer = cache.layers[self.index]
        found = layer.place() if isinstance(layer, Positioned) else None
        return None if found is None else Place(*found)
