"""Makes the arithmetic of a model's experts: for weights in the model's dtype, or for quantized weights.
Chooses whether activations are rounded to 8 bits."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from smoe.bounds import AS_DTYPE, AUTO, BF16, EMULATED, INT8
from smoe.compute.expert_math import ExpertMath
from smoe.compute.experts import Experts
from smoe.compute.quantised_math import QuantisedMath, UnpackedTile
from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.formats.activations import fits
from smoe.kernels.isa import widest
from smoe.memory.quantised_store import QuantisedStore
from smoe.memory.store import ExpertStore
from smoe.models.quantised_linear import QuantisedLinear
from smoe.models.spec import ModelSpec


def experts_math(
    model: PreTrainedModel, spec: ModelSpec, store: ExpertStore, activations: str, may_interleave: bool = False
) -> dict[int, ExpertMath]:
    """Return the arithmetic of each layer's experts, by layer. It is made from the experts modules of `model`, which
    may have no weights. `may_interleave`: see `QuantisedMath`."""
    modules = dict(model.named_modules())
    if not isinstance(store, QuantisedStore):
        parts = {layer: experts.parts for layer, experts in store.layers.items()}
        return {site.layer: ExpertMath(modules[site.name], parts[site.layer], spec.dtype.torch) for site in spec.sites}
    tile = UnpackedTile(spec.dtype.torch)
    return {
        site.layer: QuantisedMath(
            modules[site.name],
            store.layers[site.layer].parts,
            spec.dtype.torch,
            store.matrices(site.layer),
            tile,
            activations,
            may_interleave=may_interleave,
        )
        for site in spec.sites
    }


def activations_of(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Return the type to which activation rows are rounded before quantized weights multiply them: `BF16` or `INT8`."""
    if config.activations != AUTO or config.cluster is not None:
        return on_workers(config)
    if config.device == EMULATED:  # the times of prompts are emulated from torch's products
        return BF16
    has_kernels = config.kernels != "torch" and dtype is torch.bfloat16 and device.type == "cpu"
    return INT8 if has_kernels and widest(INT8) is not None else BF16


def on_workers(config: EngineConfig) -> str:
    """Return the type of activations (`BF16` or `INT8`) for machines that compute one model together. It depends only
    on the setting and not on the machine, because all machines must compute the same bits."""
    return INT8 if config.activations == INT8 else BF16


def check_activations(
    model: PreTrainedModel, config: EngineConfig, experts: Experts, store: ExpertStore, device: torch.device
) -> None:
    """Raise `ConfigError` if the setting `activations` needs weights that the model lacks, or kernels that this machine
    lacks.

    To be called after the experts' arithmetic has been chosen.
    """
    if config.activations != INT8:
        return
    forms = [module.form for module in model.modules() if isinstance(module, QuantisedLinear)]
    has_codes = isinstance(store, QuantisedStore)
    if isinstance(store, QuantisedStore):
        forms += [matrix.form for layer in store.layers for matrix in store.matrices(layer)]
    if not any(map(fits, forms)):
        owner = "quantised weights whose codes are whole numbers (7 bits, or signed): a GGUF file's, or `precision`"
        raise ConfigError.idle("activations", config.activations, owner)
    if device.type != "cpu":
        why = f"this setting applies to computation on a CPU, and this model is on {device}; use `device=cpu`"
    elif experts.spinning_pool is None:
        why = (
            "smoe's kernels for these activations need AVX2 or NEON, llvmlite, bfloat16 and a passed self-test, "
            "which this machine lacks"
        )
    elif has_codes and not experts.multiplies_codes:
        why = "this family's experts end in a norm, and are computed on unpacked weights"
    else:
        return
    raise ConfigError(
        f"`activations={config.activations}`: {why}; or leave out `activations`",
        setting="activations",
        given=config.activations,
        allowed=f"{AS_DTYPE} here",
    )
