"""The library's own modules on a running model's weights: what it would compute with nothing of ours in the way.

The twin is the model's empty shell, whose parameters and buffers become the running model's: the same memory, so it
costs nothing, but another set of modules, without our `forward`, hooks or kernels. Its experts stay
empty; weights that stay quantised it has as the numbers that they stand for, in memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.models.outline import ExpertsSite
from smoe.models.quantised_linear import QuantisedWeight, StoredEmbedding


class ModelPart(NamedTuple):
    """A module that is compared as a whole."""

    layer: int | None
    """The decoder layer that it belongs to; None for what all share: embedding, last norm, output head."""
    name: str
    """Its path, within the decoder layer where it has one."""
    path: str


def share_weights(twin: PreTrainedModel, model: PreTrainedModel) -> None:
    """Let `twin`, of the same configuration and on the meta device, use the weights of `model`, experts aside."""
    modules = dict(model.named_modules())
    for name, module in twin.named_modules():
        source = modules[name]
        if isinstance(source, (QuantisedWeight, StoredEmbedding)):
            module._parameters["weight"] = nn.Parameter(source.weight, requires_grad=False)
        for key in module._parameters:
            weight = source._parameters.get(key)
            if weight is not None:
                plain = weight.detach().as_subclass(torch.Tensor)  # type: ignore[arg-type]
                module._parameters[key] = nn.Parameter(plain, requires_grad=False)
        module._buffers.update({key: source._buffers[key] for key in module._buffers})
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):  # neither parameter nor buffer: a copy of one
                vars(module)[key] = vars(source)[key]
    if twin.config._attn_implementation != model.config._attn_implementation:
        twin.set_attn_implementation(model.config._attn_implementation)


def parts_of(model: PreTrainedModel, sites: Sequence[ExpertsSite]) -> list[ModelPart]:
    """The non-expert parts of a model, in modules that are as large as possible.

    What lies around a layer's experts (router, shared experts) comes one by one, and then the block that holds them
    all. What joins the parts is left: decoder layers and the modules around them.
    """
    experts = {site.name for site in sites}
    blocks = {name.rpartition(".")[0] for name in experts}
    layers = _list_of_layers(sites)
    joining = {"", *(path[:end] for path in blocks for end in range(len(path)) if path[end] == ".")}

    def below(path: str, module: nn.Module) -> Iterator[ModelPart]:
        for name, child in module.named_children():
            at = f"{path}.{name}" if path else name
            if at in experts:
                continue
            is_joining = at in joining or path == layers or isinstance(child, nn.ModuleList)
            if is_joining or at in blocks:
                yield from below(at, child)
            if not is_joining:
                yield _part(at, layers)

    return list(below("", model))


def _list_of_layers(sites: Sequence[ExpertsSite]) -> str:
    """The path of the list that holds the decoder layers: an experts module's path has one number."""
    names = sites[0].name.split(".")
    return ".".join(names[: next(n for n, name in enumerate(names) if name.isdecimal())])


def _part(path: str, layers: str) -> ModelPart:
    if not path.startswith(f"{layers}."):
        return ModelPart(None, path, path)
    number, _, name = path.removeprefix(f"{layers}.").partition(".")
    return ModelPart(int(number), name, path)
