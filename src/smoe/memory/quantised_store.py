"""Where experts lie that are stored in quantised formats: they go into their slots as they are, byte for byte.

    file   | gate of expert 0, 1, ... | up of expert 0, 1, ... | down ...      one tensor each for all of a layer
    slot   | gate | up | down |                                               three ranges of bytes, nothing converted

Formats may differ from layer to layer and between the matrices of an expert; within a layer all experts have the same.

Where a file has codes and scales apart, they pass through a staging buffer and become blocks in the slot; the bits of
neither change. Biases come along in the type that the model computes in; where the file has them in another, whole
experts pass through the staging buffer.

    file   | codes of expert 0, 1, ... | scales of expert 0, 1, ... | biases ...
    slot   | scale, codes | scale, codes | ...  | bias | ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from smoe.errors import CheckpointError
from smoe.formats.base import Format
from smoe.formats.registry import FORMATS
from smoe.memory.dtypes import TORCH
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import (
    MATRIX_ALIGNMENT,
    ExpertStore,
    LayerExperts,
    Part,
    Piece,
    Placement,
    Spread,
    locate,
    pieces_of,
    reads_of,
    runs_of,
)

_SCALE_BYTES = 1
"""Of a block whose scale lies apart in the file: it comes first in the slot, the codes behind it."""
_UNCHANGED = Spread(1, 1)
"""Bytes one behind the other."""


class StoredMatrix(NamedTuple):
    """One matrix of every expert of a layer, as the file has it."""

    name: str
    """The part's, and which piece of it: `gate_up_proj.0`."""
    part: str
    form: Format
    outputs: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.outputs * self.form.row_bytes(self.columns)


class QuantisedStore(ExpertStore):
    """Placements of experts in quantised formats; `dtype` is that of their biases in the slot, by its safetensors name.

    Raises `CheckpointError` where the experts of a layer differ in format, or only some matrices are quantised.
    """

    def __init__(self, layers: Mapping[int, LayerExperts], dtype: str = "BF16") -> None:
        self._matrices = {layer: _matrices_of(experts) for layer, experts in layers.items()}
        super().__init__(layers, dtype, alignment=1)

    def matrices(self, layer: int) -> Sequence[StoredMatrix]:
        """What an expert of this layer is made of, in the order of its parts."""
        return self._matrices[layer]

    def check_finite(self, layer: int, expert: int, placement: Placement, buffer: memoryview) -> None:
        for matrix in self._matrices[layer]:
            data = np.frombuffer(buffer, np.uint8, matrix.nbytes, placement.parts[matrix.name])
            if not matrix.form.is_finite(data):
                tensor = self._pieces(layer, expert)[matrix.name]
                tensor = tensor.scales or tensor
                remedy = "run smoe pack" if tensor.is_packed else "download the checkpoint"
                raise CheckpointError(
                    f"{tensor.path}: {tensor.key!r} ({matrix.part} of expert {expert} in layer {layer}) has a scale "
                    f"that is NaN or infinite in {matrix.form.name}; {remedy} again"
                )
        self._check_parts(layer, expert, filter(_is_bias, self.layers[layer].parts), placement, buffer)

    def _in_place(self, layer: int, expert: int) -> Placement | None:
        tensors = self._pieces(layer, expert)
        if any(tensor.scales is not None or tensor.dtype not in (*FORMATS, self.dtype) for tensor in tensors.values()):
            return None
        spans = {name: (tensor.path, tensor.offset, tensor.nbytes) for name, tensor in tensors.items()}
        runs = runs_of(list(spans.values()))
        reads, starts = reads_of(runs)
        parts = {name: locate(span, runs, starts) for name, span in spans.items()}
        if any(parts[name] % self.item_bytes for name, tensor in tensors.items() if tensor.dtype == self.dtype):
            return None
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        layout = self._layout_of(layer, parts)
        return Placement(reads, parts, (), nbytes, layout, reads[-1].target + reads[-1].nbytes)

    def _staged(self, layer: int, expert: int) -> Placement:
        parts: dict[str, int] = {}
        pieces: list[Piece] = []
        target = 0
        for name, tensor in self._pieces(layer, expert).items():
            parts[name] = target
            form = FORMATS.get(tensor.dtype)
            if form is None:
                pieces += pieces_of(tensor, target, self.item_bytes)
                target += prod(tensor.shape) * self.item_bytes
            else:
                pieces += _blocks(tensor, form, target)
                target += prod(tensor.shape[:-1]) * form.row_bytes(tensor.shape[-1])
            target = -(-target // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT
        buffer_bytes = max(piece.read.nbytes for piece in pieces)
        return Placement((), parts, tuple(pieces), target, self._layout_of(layer, parts), buffer_bytes)

    def _layout_of(self, layer: int, parts: Mapping[str, int]) -> int:
        formats = tuple(matrix.form.name for matrix in self._matrices[layer])
        return self._layouts.setdefault((self.layers[layer].parts, formats, *parts.items()), len(self._layouts))

    def _pieces(self, layer: int, expert: int) -> dict[str, StoredTensor]:
        """The stored tensors by what they are in the slot: matrices by their pieces' names, biases by their own."""
        experts = self.layers[layer]
        return {name: tensor for name, _, tensor in _named(experts.parts, experts.sources[expert])}


def is_quantised(layers: Mapping[int, LayerExperts]) -> bool:
    """Whether any expert is stored in a quantised format."""
    return any(
        tensor.dtype in FORMATS
        for experts in layers.values()
        for tensors in experts.sources[0].values()
        for tensor in tensors
    )


def _is_bias(part: Part) -> bool:
    return len(part.shape) == 1


def _named(
    parts: Sequence[Part], sources: Mapping[str, tuple[StoredTensor, ...]]
) -> Iterator[tuple[str, str, StoredTensor]]:
    """(name in the slot, part, tensor) of everything that an expert is made of."""
    for part in parts:
        for n, tensor in enumerate(sources[part.name]):
            yield (part.name if _is_bias(part) else f"{part.name}.{n}"), part.name, tensor


def _blocks(tensor: StoredTensor, form: Format, target: int) -> list[Piece]:
    """What makes the blocks of a matrix; `target`: where they begin in the slot."""
    if tensor.scales is None:
        return pieces_of(tensor, target, 1, _UNCHANGED)
    codes, scale = Spread(form.nbytes - _SCALE_BYTES, form.nbytes), Spread(_SCALE_BYTES, form.nbytes)
    return [
        *pieces_of(tensor, target + _SCALE_BYTES, 1, codes),
        *pieces_of(tensor.scales, target, 1, scale),
    ]


def _matrices_of(experts: LayerExperts) -> tuple[StoredMatrix, ...]:
    biases = {part.name for part in experts.parts if _is_bias(part)}
    first, *others = (list(_named(experts.parts, of)) for of in experts.sources)
    for name, part, tensor in first:
        if part in biases and tensor.dtype in TORCH:
            continue
        if tensor.dtype not in FORMATS or len(tensor.shape) != 2:
            raise CheckpointError(
                f"{tensor.path}: {tensor.key!r} is {tensor.dtype}{list(tensor.shape)}, but other matrices of the "
                f"experts are quantised; smoe reads experts that are quantised whole, in {', '.join(FORMATS)}"
            )
        del name, part
    wanted = [(name, tensor.dtype, tensor.shape) for name, _, tensor in first]
    for expert, of in enumerate(others, start=1):
        if [(name, tensor.dtype, tensor.shape) for name, _, tensor in of] != wanted:
            raise CheckpointError(
                f"{of[0][2].path}: experts 0 and {expert} of layer {experts.layer} are stored in different formats"
            )
    return tuple(
        StoredMatrix(name, part, FORMATS[tensor.dtype], *tensor.shape)
        for name, part, tensor in first
        if part not in biases
    )
