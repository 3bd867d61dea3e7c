"""Locates experts that are stored in quantized formats. Their blocks are read into slots unchanged; on a CPU, rows may
be interleaved afterwards (`compute/interleaved_slots.py`).

In most files a tensor has one matrix of all experts of a layer, and an expert consists of three byte ranges:

    file   | gate of expert 0, 1, ... | up of expert 0, 1, ... | down ...
    slot   | gate | up | down |

Formats may differ between layers, and between the matrices of an expert; within a layer all experts have the same
formats. If only some matrices are quantized, the others keep their own dtype too (`formats/plain.py`). Biases follow
the matrices, in the model's dtype. They are read with the matrices if the file stores them next to these in that dtype,
else through a staging buffer:

    slot   | gate | up | down | biases of gate and up | bias of down |

If a file stores codes and scales separately, matrices go through the staging buffer too, and become blocks in the slot,
with unchanged bits:

    file   | codes of expert 0, 1, ... | scales of expert 0, 1, ... | biases ...
    slot   | scale, codes | scale, codes | ...  | bias | ...
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.formats.base import Format
from smoe.formats.plain import PLAIN
from smoe.formats.registry import FORMATS
from smoe.memory.arrangement import Spread
from smoe.memory.dtypes import STORED, Dtype
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import (
    MATRIX_ALIGNMENT,
    ExpertStore,
    Part,
    SlotLayout,
    StoredLayer,
    StoredRun,
    arranged_pieces,
    locate,
    pieces_of,
    reads_of,
    runs_of,
)

_FORMS: Mapping[str, Format] = ChainMap(PLAIN, FORMATS)  # plug-ins add formats


class StoredMatrix(NamedTuple):
    """One matrix of every expert of a layer, in the quantized format of the file."""

    name: str
    """The name of the expert's part, and the number of the matrix in it, as in `gate_up_proj.0`."""
    part: str
    form: Format
    outputs: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.outputs * self.form.row_bytes(self.columns)


class QuantisedStore(ExpertStore):
    """Finds the byte ranges of experts that are stored in quantized formats. `dtype`: the safetensors name of the dtype
    that biases have in slots.

    Raises `CheckpointError` if experts of a layer have different formats, or a matrix has an unknown format.
    """

    def __init__(self, layers: Mapping[int, StoredLayer], dtype: str = "BF16") -> None:
        self._matrices = {layer: _matrices_of(experts) for layer, experts in layers.items()}
        super().__init__(layers, dtype, alignment=1)

    def matrices(self, layer: int) -> Sequence[StoredMatrix]:
        """Return the matrices of an expert in this layer, in the order of the expert's parts."""
        return self._matrices[layer]

    def check_finite(self, layer: int, expert: int, placement: SlotLayout, buffer: memoryview) -> None:
        for matrix in self._matrices[layer]:
            data = np.frombuffer(buffer, np.uint8, matrix.nbytes, placement.parts[matrix.name])
            if not matrix.form.is_finite(data):
                tensor = self._pieces(layer, expert)[matrix.name]
                tensor = tensor.made_of[:2][-1].tensor if tensor.made_of else tensor
                remedy = "run smoe pack" if tensor.is_packed else "download the checkpoint"
                raise CheckpointError(
                    f"{tensor.path}: {tensor.key!r} ({matrix.part} of expert {expert} in layer {layer}) has a scale "
                    f"that is NaN or infinite in {matrix.form.name}; {remedy} again"
                )
        self._check_parts(layer, expert, filter(_is_bias, self.layers[layer].parts), placement, buffer)

    def _in_place(self, layer: int, expert: int) -> SlotLayout | None:
        matrices = self._pieces(layer, expert)
        if any(tensor.made_of for tensor in matrices.values()):
            return None
        tensors = matrices | self._biases_along(layer, expert)
        spans = {name: (tensor.path, tensor.offset, tensor.nbytes) for name, tensor in tensors.items()}
        runs = runs_of(list(spans.values()))
        reads, starts = reads_of(runs)
        parts = {name: locate(span, runs, starts) for name, span in spans.items()}
        nbytes = sum(matrix.nbytes for matrix in self._matrices[layer])
        target, pieces = reads[-1].target + reads[-1].nbytes, []
        for bias in filter(_is_bias, self.layers[layer].parts):
            nbytes += prod(bias.shape) * self.item_bytes
            if bias.name not in parts or parts[bias.name] % self.item_bytes:
                parts[bias.name] = target
                pieces += self._bias(layer, expert, bias, target)
                target = _aligned(target + prod(bias.shape) * self.item_bytes)
        return SlotLayout(reads, parts, tuple(pieces), nbytes, self._layout_of(layer, parts), target)

    def _biases_along(self, layer: int, expert: int) -> dict[str, StoredTensor]:
        """Return the biases that are read directly into the slot together with the matrices. They are in files written
        by `smoe pack`, in the model's dtype."""
        sources = self.layers[layer].sources[expert]
        stored = {part.name: sources[part.name][0] for part in filter(_is_bias, self.layers[layer].parts)}
        return {name: each for name, each in stored.items() if each.is_packed and each.dtype == self.dtype}

    def _staged(self, layer: int, expert: int) -> SlotLayout:
        parts: dict[str, int] = {}
        pieces: list[StoredRun] = []
        target, tensors = 0, self._pieces(layer, expert)
        for part in self.layers[layer].parts:
            if _is_bias(part):
                parts[part.name] = target
                pieces += self._bias(layer, expert, part, target)
                target = _aligned(target + prod(part.shape) * self.item_bytes)
                continue
            for matrix in self._matrices[layer]:
                if matrix.part == part.name:
                    parts[matrix.name] = target
                    pieces += _ingredients(tensors[matrix.name], matrix, target)
                    target = _aligned(target + matrix.nbytes)
        return SlotLayout((), parts, tuple(pieces), target, self._layout_of(layer, parts), target)

    def _bias(self, layer: int, expert: int, part: Part, target: int) -> list[StoredRun]:
        """Return the chunks in which an expert's bias is read through the staging buffer. The bias's stored tensors
        follow each other in the slot, from offset `target` on."""
        pieces: list[StoredRun] = []
        for tensor in self.layers[layer].sources[expert][part.name]:
            pieces += pieces_of(tensor, target, self.item_bytes)
            target += prod(tensor.shape) * self.item_bytes
        return pieces

    def _layout_of(self, layer: int, parts: Mapping[str, int]) -> int:
        formats = tuple(matrix.form.name for matrix in self._matrices[layer])
        return self._layouts.setdefault((self.layers[layer].parts, formats, *parts.items()), len(self._layouts))

    def _pieces(self, layer: int, expert: int) -> dict[str, StoredTensor]:
        """Return the stored tensors of an expert's matrices, by the names that the matrices have in the slot."""
        experts = self.layers[layer]
        matrices = [part for part in experts.parts if not _is_bias(part)]
        return {name: tensor for name, _, tensor in _named(matrices, experts.sources[expert])}


def is_quantised(layers: Mapping[int, StoredLayer]) -> bool:
    """Return whether any expert is stored in a quantized format."""
    return any(
        tensor.dtype in FORMATS
        for experts in layers.values()
        for tensors in experts.sources[0].values()
        for tensor in tensors
    )


def is_in_pieces(matrix: StoredTensor) -> bool:
    """Return whether a matrix is stored as separate codes and scales, which are joined to blocks while the matrix is
    loaded."""
    return bool(matrix.made_of) and all(each.arrangement is not None for each in matrix.made_of)


def expert_bytes(experts: StoredLayer, dtype: Dtype) -> int:
    """Return the bytes of one expert of a layer, without alignment: matrices as stored, biases in `dtype`."""
    first = experts.sources[0]
    matrices = sum(blocks_bytes(tensor) for part in experts.parts if not _is_bias(part) for tensor in first[part.name])
    return matrices + dtype.itemsize * sum(prod(part.shape) for part in filter(_is_bias, experts.parts))


def blocks_bytes(matrix: StoredTensor) -> int:
    """Return the bytes that a matrix has in a slot: as blocks if it is quantized, else as stored."""
    if matrix.dtype not in FORMATS:
        return matrix.nbytes
    return matrix.shape[0] * FORMATS[matrix.dtype].row_bytes(matrix.shape[1])


def _is_bias(part: Part) -> bool:
    return len(part.shape) == 1


def _named(
    parts: Sequence[Part], sources: Mapping[str, tuple[StoredTensor, ...]]
) -> Iterator[tuple[str, str, StoredTensor]]:
    """Yield (name in the slot, name of the weight, tensor) for every stored tensor of an expert. The name in the slot
    is the weight's name with a number."""
    for part in parts:
        for n, tensor in enumerate(sources[part.name]):
            yield f"{part.name}.{n}", part.name, tensor


def _aligned(offset: int) -> int:
    """Return the smallest offset in a slot, not below `offset`, at which a weight may begin."""
    return -(-offset // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT


def _ingredients(matrix: StoredTensor, stored: StoredMatrix, target: int) -> Iterator[StoredRun]:
    """Yield the chunks of a matrix that begins at offset `target` of the slot. Each stored tensor of the matrix has its
    own conversion; a matrix stored as blocks is only copied."""
    if not matrix.made_of:
        block = stored.form.nbytes
        yield from arranged_pieces(matrix, target, Spread(block, block))
    for each in matrix.made_of:
        if each.arrangement is None:
            raise UnsupportedModelError(
                f"{matrix.path}: {matrix.key!r} has its columns in another order than its scales (act-order), by "
                f"{each.tensor.key!r}; such weights cannot be used directly: run smoe pack with `precision=int8` "
                "or int4 once, and give the same `precision` whenever the model is used"
            )
        yield from arranged_pieces(each.tensor, target + each.place, each.arrangement)


def _matrices_of(experts: StoredLayer) -> tuple[StoredMatrix, ...]:
    biases = {part.name for part in experts.parts if _is_bias(part)}
    first, *others = (list(_named(experts.parts, experts.sources[sample])) for sample in experts.samples)
    for name, part, tensor in first:
        if part in biases and tensor.dtype in STORED:
            continue
        form = _FORMS.get(tensor.dtype)
        if form is None or len(tensor.shape) != 2 or not form.fits(tensor.shape[1]):
            raise CheckpointError(
                f"{tensor.path}: the tensor {tensor.key!r} is {tensor.dtype}{list(tensor.shape)}, but other matrices "
                f"of the experts are quantised; together with quantised matrices smoe reads {', '.join(_FORMS)}, in "
                "rows of whole blocks (16 numbers for types without blocks)"
            )
        del name, part
    wanted = [(name, tensor.dtype, tensor.shape) for name, _, tensor in first]
    for expert, of in enumerate(others, start=1):
        if [(name, tensor.dtype, tensor.shape) for name, _, tensor in of] != wanted:
            raise CheckpointError(
                f"{of[0][2].path}: experts 0 and {expert} of layer {experts.layer} are stored in different formats; "
                "smoe reads only models whose experts of a layer have one format"
            )
    return tuple(
        StoredMatrix(name, part, _FORMS[tensor.dtype], *tensor.shape)
        for name, part, tensor in first
        if part not in biases
    )
