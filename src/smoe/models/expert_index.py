"""From checkpoint keys to experts, by the library's own renaming and conversion rules.

Two checkpoint forms occur: one tensor for each expert and matrix, merged by a `WeightConverter`, and already fused
tensors with the experts in the first dimension. Anything else a converter may do is refused by name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import LayerExperts, row_of
from smoe.models.experts import ExpertsSite

_MERGING = ("MergeModulelist", "Concatenate")


def index_experts(
    model: PreTrainedModel, sites: Sequence[ExpertsSite], tensors: Mapping[str, StoredTensor]
) -> dict[int, LayerExperts]:
    """The stored pieces of every expert by layer. `model` may be on the meta device; it must still have its experts."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    converter_of = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    wanted = {f"{site.name}.{part.name}": (site, part.name) for site in sites for part in site.parts}
    found: dict[tuple[int, str], dict[int, list[tuple[int, StoredTensor]]]] = defaultdict(lambda: defaultdict(list))
    for key, tensor in tensors.items():
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target not in wanted:
            continue
        site, part = wanted[target]
        pieces = found[site.layer, part]
        if pattern is None:
            for expert in range(_fused_experts(site, key, tensor)):
                pieces[expert].append((0, row_of(tensor, expert)))
        else:
            converter = converter_of[pattern]
            _check_operations(converter, key)
            pieces[_expert_number(key, site)].append((converter.source_patterns.index(pattern), tensor))
    return {site.layer: _layer(site, found) for site in sites}


def _fused_experts(site: ExpertsSite, key: str, tensor: StoredTensor) -> int:
    if not tensor.shape or tensor.shape[0] != site.experts:
        raise CheckpointError(
            f"{key!r} should have {site.experts} experts in its first dimension, it is {tensor.shape}"
        )
    return site.experts


def _check_operations(converter: WeightConverter, key: str) -> None:
    odd = [type(op).__name__ for op in converter.operations if type(op).__name__ not in _MERGING]
    if odd:
        raise UnsupportedModelError(
            f"{key!r} needs the conversion {odd[0]}, which smoe cannot apply to a single expert"
        )


def _expert_number(key: str, site: ExpertsSite) -> int:
    match = re.search(r"experts\.(\d+)\.", key)
    if match is None:
        raise UnsupportedModelError(f"no expert number in the checkpoint key {key!r}")
    if int(match[1]) >= site.experts:
        raise CheckpointError(f"{key!r} is one expert too many: config.json says {site.experts} a layer")
    return int(match[1])


def _layer(
    site: ExpertsSite, found: Mapping[tuple[int, str], Mapping[int, list[tuple[int, StoredTensor]]]]
) -> LayerExperts:
    sources: list[dict[str, tuple[StoredTensor, ...]]] = []
    for expert in range(site.experts):
        pieces: dict[str, tuple[StoredTensor, ...]] = {}
        for part in site.parts:
            entries = found.get((site.layer, part.name), {}).get(expert)
            if not entries:
                raise CheckpointError(
                    f"the checkpoint has no {part.name} for expert {expert} of layer {site.layer} ({site.name}); "
                    "it is incomplete, or quantised in a form that smoe does not read"
                )
            pieces[part.name] = tuple(tensor for _, tensor in sorted(entries, key=lambda entry: entry[0]))
        sources.append(pieces)
    return LayerExperts(site.layer, site.parts, sources)
