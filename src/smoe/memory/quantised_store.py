"""Where experts lie that are stored in quantised formats: they go into their slots as they are, byte for byte.

    file   | gate of expert 0, 1, ... | up of expert 0, 1, ... | down ...      one tensor each for all of a layer
    slot   | gate | up | down |                                               three ranges of bytes, nothing converted

Formats may differ from layer to layer and between the matrices of an expert; within a layer all experts have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from smoe.errors import CheckpointError
from smoe.formats.base import Format
from smoe.formats.registry import FORMATS
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import ExpertStore, LayerExperts, Placement, locate, reads_of, runs_of

AS_STORED = "as stored"
"""In the place of a dtype: every matrix has its own format."""


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
    """Placements of experts in quantised formats.

    Raises `CheckpointError` where the experts of a layer differ in format, or only some matrices are quantised.
    """

    def __init__(self, layers: Mapping[int, LayerExperts]) -> None:
        self._matrices = {layer: _matrices_of(experts) for layer, experts in layers.items()}
        super().__init__(layers, AS_STORED, alignment=1)

    def matrices(self, layer: int) -> Sequence[StoredMatrix]:
        """What an expert of this layer is made of, in the order of its parts."""
        return self._matrices[layer]

    def check_finite(self, layer: int, expert: int, placement: Placement, buffer: memoryview) -> None:
        for matrix in self._matrices[layer]:
            data = np.frombuffer(buffer, np.uint8, matrix.nbytes, placement.parts[matrix.name])
            if not matrix.form.is_finite(data):
                tensor = self._pieces(layer, expert)[matrix.name]
                raise CheckpointError(
                    f"{tensor.path}: {tensor.key!r} ({matrix.part} of expert {expert} in layer {layer}) has a scale "
                    f"that is NaN or infinite in {matrix.form.name}; download the checkpoint again"
                )

    def _in_place(self, layer: int, expert: int) -> Placement:
        tensors = self._pieces(layer, expert)
        spans = {name: (tensor.path, tensor.offset, tensor.nbytes) for name, tensor in tensors.items()}
        runs = runs_of(list(spans.values()))
        reads, starts = reads_of(runs)
        parts = {name: locate(span, runs, starts) for name, span in spans.items()}
        formats = tuple(matrix.form.name for matrix in self._matrices[layer])
        layout = self._layouts.setdefault((self.layers[layer].parts, formats, *parts.items()), len(self._layouts))
        nbytes = sum(matrix.nbytes for matrix in self._matrices[layer])
        return Placement(reads, parts, (), nbytes, layout, reads[-1].target + reads[-1].nbytes)

    def _pieces(self, layer: int, expert: int) -> dict[str, StoredTensor]:
        sources = self.layers[layer].sources[expert]
        return {_name(part, n): tensor for part, tensors in sources.items() for n, tensor in enumerate(tensors)}


def is_quantised(layers: Mapping[int, LayerExperts]) -> bool:
    """Whether any expert is stored in a quantised format."""
    return any(
        tensor.dtype in FORMATS
        for experts in layers.values()
        for tensors in experts.sources[0].values()
        for tensor in tensors
    )


def _name(part: str, piece: int) -> str:
    return f"{part}.{piece}"


def _matrices_of(experts: LayerExperts) -> tuple[StoredMatrix, ...]:
    first, *others = (
        [(_name(part.name, n), part.name, tensor) for part in experts.parts for n, tensor in enumerate(of[part.name])]
        for of in experts.sources
    )
    for name, part, tensor in first:
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
    return tuple(StoredMatrix(name, part, FORMATS[tensor.dtype], *tensor.shape) for name, part, tensor in first)
