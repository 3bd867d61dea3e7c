"""A second set of transformers modules with a running model's weights, to compare results with.

The twin is the model without weights at first. Its parameters and buffers become those of the running model: the same
memory, but modules without our forward functions, hooks or kernels. Its experts stay empty. Weights that stay quantized
are dequantized into memory that belongs to the twin. Large tables stay on disk, and both models use the same module.
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
    """A module of a model whose output is compared with another implementation's output."""

    layer: int | None
    """The decoder layer that contains the module; None for the embedding, the last norm and the output head."""
    name: str
    """The module's path, relative to its decoder layer if it has one."""
    path: str


def share_weights(twin: PreTrainedModel, model: PreTrainedModel) -> None:
    """Make `twin`, a model of the same configuration on the meta device, use the weights of `model`, except the
    experts' weights."""
    modules, embedding = dict(model.named_modules()), model.get_input_embeddings()
    for name, module in list(twin.named_modules()):
        source = modules[name]
        if isinstance(source, StoredEmbedding) and source is not embedding:  # a table that may exceed the memory
            twin.set_submodule(name, source)
            continue
        if isinstance(source, (QuantisedWeight, StoredEmbedding)):
            weight = source.whole() if isinstance(source, StoredEmbedding) else source.weight
            module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        for key in module._parameters:
            weight = source._parameters.get(key)
            if weight is not None:
                plain = weight.detach().as_subclass(torch.Tensor)  # type: ignore[arg-type]
                module._parameters[key] = nn.Parameter(plain, requires_grad=False)
        module._buffers.update({key: source._buffers[key] for key in module._buffers})
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):  # a plain attribute that is a copy of a buffer
                vars(module)[key] = vars(source)[key]
    if twin.config._attn_implementation != model.config._attn_implementation:
        twin.set_attn_implementation(model.config._attn_implementation)


def parts_of(model: PreTrainedModel, sites: Sequence[ExpertsSite]) -> list[ModelPart]:
    """Return the modules of a model whose outputs are compared: its non-expert modules, as large as possible.

    In a layer with experts these are the router and the shared experts one by one, and then the whole MoE block.
    Modules that only connect other modules, such as decoder layers, are left out.
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
    """Return the path of the list of decoder layers in the model: an experts module's path up to the layer number."""
    names = sites[0].name.split(".")
    return ".".join(names[: next(n for n, name in enumerate(names) if name.isdecimal())])


def _part(path: str, layers: str) -> ModelPart:
    if not path.startswith(f"{layers}."):
        return ModelPart(None, path, path)
    number, _, name = path.removeprefix(f"{layers}.").partition(".")
    return ModelPart(int(number), name, path)
