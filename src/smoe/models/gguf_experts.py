"""Finds the routed experts in a GGUF file.

Files have one tensor for each matrix of a layer. Until early 2024 they had one tensor for each expert and matrix.

    blk.N.ffn_gate_exps.weight, ffn_up_exps, ffn_down_exps     [E, I, H], [E, I, H], [E, H, I]
    blk.N.ffn_gate_up_exps.weight                              [E, 2I, H], in place of the first two
    blk.N.ffn_gate_exps.bias, ...                              [E, I], [E, I], [E, H], in families with biases
    blk.N.ffn_gate.E.weight, ffn_up.E, ffn_down.E              the form until early 2024

A row of a tensor always belongs to one output, even if transformers stores the family's matrices transposed, or with
the rows of gate and up alternating.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.formats.registry import FORMATS
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import FusedExperts, Part, StoredLayer, row_of
from smoe.models.outline import ExpertsSite

_KINDS = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}
_BIAS = "_bias"


def index_gguf_experts(place: Path, site: ExpertsSite, tensors: Mapping[str, StoredTensor]) -> StoredLayer:
    """Return the stored tensors of every expert of a layer.

    Raises `CheckpointError` if a tensor is missing or has another shape, and `UnsupportedModelError` if GGUF files
    cannot represent the experts.
    """
    parts = tuple(_stored_part(part, site) for part in site.parts)
    found: dict[str, list[StoredTensor | Sequence[StoredTensor]]] = {}
    for part in parts:
        kinds, suffix = _KINDS[part.name.removesuffix(_BIAS)], "bias" if part.name.endswith(_BIAS) else "weight"
        if f"blk.{site.layer}.ffn_{'_'.join(kinds)}_exps.{suffix}" in tensors and not part.takes_turns:
            kinds = ("_".join(kinds),)
        rows, *width = part.stored_shape
        shape = (rows // len(kinds), *width)
        found[part.name] = [_every_expert(place, site, f"ffn_{kind}", suffix, shape, tensors) for kind in kinds]
    layer = StoredLayer(site.layer, parts, _sources_of(found, site.experts))
    if any(part.takes_turns for part in parts):
        _check_quantised(layer)
    return layer


def _sources_of(
    found: Mapping[str, Sequence[StoredTensor | Sequence[StoredTensor]]], experts: int
) -> Sequence[Mapping[str, tuple[StoredTensor, ...]]]:
    """Return `StoredLayer.sources`. `found[name]`: the matrices of the weight `name`, each a fused tensor, or one
    tensor for every expert."""
    fused = {name: tuple(each for each in pieces if isinstance(each, StoredTensor)) for name, pieces in found.items()}
    if all(len(fused[name]) == len(pieces) for name, pieces in found.items()):
        return FusedExperts(experts, fused)
    return [
        {
            name: tuple(row_of(each, n) if isinstance(each, StoredTensor) else each[n] for each in pieces)
            for name, pieces in found.items()
        }
        for n in range(experts)
    ]


def tensors_of(experts: StoredLayer) -> Iterator[StoredTensor]:
    """Yield stored tensors of a layer's experts, among them one with each name."""
    for sample in experts.samples:
        for pieces in experts.sources[sample].values():
            yield from pieces


def _stored_part(part: Part, site: ExpertsSite) -> Part:
    """Return the shape and layout that an expert's weight has in a GGUF file: [outputs, inputs], with the gate's rows
    before the up rows."""
    name = part.name.removesuffix(_BIAS)
    if name not in _KINDS:
        raise UnsupportedModelError(
            f"GGUF files have no tensor for {part.name!r} of {site.name!r}, so smoe cannot read this model from a "
            "GGUF file; take the model's safetensors release"
        )
    is_turned = name in site.transposed and len(part.shape) == 2
    return replace(part, is_turned=is_turned, takes_turns=site.takes_turns and name == "gate_up_proj")


def _every_expert(
    place: Path,
    site: ExpertsSite,
    stem: str,
    suffix: str,
    shape: tuple[int, ...],
    tensors: Mapping[str, StoredTensor],
) -> StoredTensor | Sequence[StoredTensor]:
    """Return the fused tensor of one matrix, or of one bias, of all experts of a layer, else a tensor for every
    expert."""
    key = f"blk.{site.layer}.{stem}_exps.{suffix}"
    fused = tensors.get(key)
    if fused is not None:
        check_shape(fused, (site.experts, *shape))
        return fused
    apart = [tensors.get(f"blk.{site.layer}.{stem}.{expert}.{suffix}") for expert in range(site.experts)]
    whole = [tensor for tensor in apart if tensor is not None]
    if len(whole) < site.experts:
        missing = key if not whole else f"blk.{site.layer}.{stem}.{apart.index(None)}.{suffix}"
        raise CheckpointError(
            f"{place} has no {missing!r}, although its metadata requires these experts of layer {site.layer}; "
            "the file is incomplete: download it again"
        )
    for tensor in whole:
        check_shape(tensor, shape)
    return whole


def check_shape(tensor: StoredTensor, wanted: Sequence[int]) -> None:
    """Raise `CheckpointError` if a tensor does not have the shape `wanted`. Dimensions of 1 are ignored, because ggml
    and transformers add and drop them."""
    if [n for n in tensor.shape if n != 1] != [n for n in wanted if n != 1]:
        raise CheckpointError(
            f"the tensor {tensor.key!r} in {tensor.path} has the shape {list(tensor.shape)}, but by the file's "
            f"metadata it has the shape {list(wanted)}; download it again"
        )


def _check_quantised(layer: StoredLayer) -> None:
    """Raise `UnsupportedModelError` if rows of gate and up that are not quantized would have to be interleaved while
    loading."""
    for part in layer.parts:
        for tensor in layer.sources[0][part.name] if len(part.shape) == 2 else ():
            if tensor.dtype not in FORMATS:
                raise UnsupportedModelError(
                    f"the tensor {tensor.key!r} in {tensor.path} is {tensor.dtype}; for this family smoe reads only "
                    "GGUF files whose experts are quantised, as published (MXFP4): take such a file, or the "
                    "safetensors release"
                )
