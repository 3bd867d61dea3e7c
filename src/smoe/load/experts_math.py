"""Makes the arithmetic of a model's experts: for weights in the model's dtype, or for quantized weights."""

from __future__ import annotations

from transformers import PreTrainedModel

from smoe.compute.expert_math import ExpertMath
from smoe.compute.quantised_math import QuantisedMath, UnpackedTile
from smoe.memory.quantised_store import QuantisedStore
from smoe.memory.store import ExpertStore
from smoe.models.spec import ModelSpec


def experts_math(
    model: PreTrainedModel, spec: ModelSpec, store: ExpertStore, activations: str
) -> dict[int, ExpertMath]:
    """Return the arithmetic of each layer's experts, by layer. It is made from the experts modules of `model`, which
    may have no weights."""
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
        )
        for site in spec.sites
    }
