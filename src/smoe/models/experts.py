"""Finds the experts modules of a transformers model.

transformers decorates its experts classes with `use_experts_implementation`. The decorator's attributes say how one
expert is computed. Models with other experts classes are refused, because exactness could not be proven.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from smoe.errors import NotMoEError, UnsupportedModelError
from smoe.memory.store import Part
from smoe.models.dense import one_at_a_time
from smoe.models.image_families import image_family
from smoe.models.outline import ExpertsSite
from smoe.models.registration import opened_family


def is_experts(module: nn.Module) -> bool:
    """Return whether the module's class has transformers' decorator for experts."""
    return hasattr(module, "_apply_gate") and hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def meta_model(config: PretrainedConfig, dtype: torch.dtype, with_images: bool = False) -> PreTrainedModel:
    """Return the model without weights (on the meta device), with experts in transformers' eager form. `with_images`:
    with the image encoder.

    Weights that some families store in float32 in a model of another dtype are float32 here too.
    """
    config._experts_implementation = "eager"
    with one_at_a_time, torch.device("meta"):
        model: PreTrainedModel = auto_class(config, with_images).from_config(config, dtype=dtype)
    return model.eval()


def auto_class(config: PretrainedConfig, with_images: bool = False) -> Any:
    """Return the class that builds a language model from a configuration. Raise `UnsupportedModelError` if there is
    none.

    It is a class of ours if there is one for the family. Otherwise it is transformers' class for causal language
    models, or its class for images and text, which also works without images. `with_images`: a class that has the image
    encoder.
    """
    if with_images:
        image_family(config)  # raises the error of families without images
    opened = opened_family(config.model_type, with_images)
    if opened is not None:
        return opened
    if with_images:
        return AutoModelForImageTextToText
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedModelError(
        f"{config.model_type!r}: transformers has no class of this family that generates text; "
        "docs/families.md lists what works"
    )


def find_sites(model: PreTrainedModel) -> list[ExpertsSite]:
    """Return the experts modules of a model in layer order.

    Raises `NotMoEError` if the model is dense, and `UnsupportedModelError` if its experts are of an unknown kind.
    """
    sites = [_site(name, module) for name, module in model.named_modules() if is_experts(module)]
    if not sites:
        kind = model.config.model_type
        undecorated = [n for n, _ in model.named_modules() if re.search(r"\.experts$|\.block_sparse_moe$", n)]
        if undecorated:
            raise UnsupportedModelError(
                f"{kind!r} keeps its experts in {undecorated[0]!r}, in a form that transformers does not expose to "
                "other implementations; exactness cannot be proven, so it is refused. docs/families.md lists what works"
            )
        where = f" by the config.json in {model.config.name_or_path}" if model.config.name_or_path else ""
        raise NotMoEError(
            f"{kind!r} has no routed experts{where}: it is a dense model, and smoe runs Mixture-of-Experts models "
            "only; give another model, or run this one with transformers"
        )
    layers = [site.layer for site in sites]
    if len(set(layers)) != len(layers):
        raise UnsupportedModelError(
            f"{model.config.model_type!r} has several experts modules in one layer, which smoe does not support"
        )
    return sorted(sites, key=lambda site: site.layer)


def _site(name: str, module: nn.Module) -> ExpertsSite:
    indices = re.findall(r"\.(\d+)\.", name)
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False)}
    experts = int(getattr(module, "num_experts", 0))
    odd = [n for n, shape in shapes.items() if not shape or shape[0] != experts]
    if len(indices) != 1 or odd or not shapes:
        raise UnsupportedModelError(
            f"the experts module {name!r} ({type(module).__name__}) has the parameters {shapes}, a layout that smoe "
            "does not know"
        )
    parts = tuple(Part(n, shape[1:]) for n, shape in shapes.items())
    transposed = frozenset(n for n in shapes if is_transposed(module, n))
    takes_turns = not getattr(module, "is_concatenated", True)
    return ExpertsSite(int(indices[0]), name, experts, parts, transposed, takes_turns)


def is_transposed(module: nn.Module, part: str) -> bool:
    """Return whether a matrix of an experts module is stored as [inputs, outputs]."""
    return bool(module.is_transposed) or part in getattr(module, "transposed_parts", ())


@contextmanager
def without_weights_on_disk(model: PreTrainedModel, tables: Set[str]) -> Iterator[None]:
    """During the `with` block, make transformers build models of the same classes without parameters for experts and
    for `tables` (`Outline.tables`).

    transformers' loader then finds no parameters for the keys of these weights, and does not read them.
    """
    stripped = {type(module): [""] for module in model.modules() if is_experts(module)}
    for name in tables:
        owner, _, child = name.removesuffix(".weight").rpartition(".")
        stripped.setdefault(type(model.get_submodule(owner)), []).append(child)
    originals = {cls: cls.__init__ for cls in stripped}
    for cls, original in originals.items():
        cls.__init__ = _stripping(original, stripped[cls])
    try:
        yield
    finally:
        for cls, original in originals.items():
            cls.__init__ = original


def _stripping(original, paths):  # type: ignore[no-untyped-def]
    def __init__(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: N807
        original(self, *args, **kwargs)
        for path in paths:
            module = self.get_submodule(path)
            for name in list(dict(module.named_parameters(recurse=False))):
                del module._parameters[name]
            module._is_hf_initialized = True  # prevents transformers from initializing weights

    return __init__
