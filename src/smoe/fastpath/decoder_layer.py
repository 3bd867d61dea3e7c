"""Finds the decoder layers that our kernels compute, and replaces their forward functions (`fast_layer.py`). Everything
of a layer except its experts is one kernel call for a token, a job (`kernels/token_attention.py`).

    h = x + attention(norm(x))      one job, which also computes the second norm
    y = h + mlp(norm(h))            the mlp is transformers', with our experts

A layer of this structure is recognized by the names of its modules and tested: with a KV cache of a few positions and a
stub for the mlp, our method and transformers' must compute the same bits. Several tokens of one text take a method of
their own (`prompt_layer.py`). transformers computes everything else: other layers, several texts, masks that hide more
than later tokens, modules with hooks, and replaced modules (adapters).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.fastpath import attention
from smoe.fastpath.fast_layer import ATTENTION, LAST_NORM, NORM, FastLayer, is_row
from smoe.fastpath.layer_proof import PROOF_POSITIONS, Embeddings, agrees, agrees_on_prompts
from smoe.fastpath.prompt_layer import PromptLayer
from smoe.kernels.matrix import Matrix
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.token_attention import Norm, Parts, Projection, Scratch, TokenAttention, fits
from smoe.kernels.verdicts import Verdicts
from smoe.models.quantised_linear import QuantisedLinear

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_PROMPTS = "prompt in a decoder layer"


def speed_up(
    model: PreTrainedModel,
    pool: SpinningPool,
    linears: Mapping[nn.Module, int],
    norms: Mapping[nn.Module, float],
    verdicts: Verdicts | None = None,
) -> dict[nn.Module, FastLayer]:
    """Replace the forward function of every decoder layer whose bits our kernels reproduce, for calls with one token.
    Return the layers with their new functions.

    `linears`: the bf16 layers that our kernels multiply, with their `Product.part`. `norms`: the RMSNorms that our
    kernels compute, with their epsilons. `verdicts`: known results of proofs; this function adds its own. Takes some
    ten milliseconds for every distinct kind of layer.
    """
    embeddings = _embeddings(model)
    if embeddings is None:
        return {}
    scratch, verdicts, found = Scratch(), verdicts or Verdicts(), dict[nn.Module, FastLayer]()
    for layer in model.modules():
        parts = _parts(layer, linears, norms, embeddings.cos.shape[-1])
        if parts is None:
            continue
        scratch.reserve(parts)
        ours = FastLayer(layer, TokenAttention(pool, parts, scratch))
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
    ours: FastLayer,
    embeddings: Embeddings,
    pool: SpinningPool,
    verdict: Callable[[Callable[[], bool]], bool],
) -> None:
    """Make a decoder layer compute several tokens of one text by our method, if our kernel computes their attention and
    the bits are those of transformers. `verdict`: returns the result of a test, which may be known."""
    own = layer.get_submodule(ATTENTION)
    if attention.prompt_kernel_of(own) is None:
        return
    prompt = PromptLayer(own, ours.work.parts, pool)
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
    is_known = isinstance(found, tuple) and len(found) == 2 and all(map(is_row, found)) and found[0].dim() == 3
    return Embeddings(*found) if is_known else None


def _parts(
    layer: nn.Module, linears: Mapping[nn.Module, int], norms: Mapping[nn.Module, float], rotary: int
) -> Parts | None:
    """Return the modules of a decoder layer as arguments for the layer's job. Return None if the layer has other
    modules, or if our kernels do not compute one of its modules."""
    names = dict(layer.named_children())
    if not {ATTENTION, NORM, LAST_NORM} < set(names) or len(names) != 4 or "forward" in vars(layer):
        return None
    own = names[ATTENTION]
    kernel, scale, inner = attention.kernel_of(own), getattr(own, "scaling", None), dict(own.named_children())
    has_more = not set(_PROJECTIONS) <= set(inner) <= {*_PROJECTIONS, *_HEAD_NORMS} or own._parameters
    if kernel is None or has_more or not isinstance(scale, float):
        return None
    projections = [_projection(inner[name], linears) for name in _PROJECTIONS]
    first, last = (_norm(names[name], norms) for name in (NORM, LAST_NORM))
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
    own = layer.get_submodule(ATTENTION)
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
