"""The expert store: where on disk every routed expert lies, and how it is laid into a slot.

An expert has *parts* (`gate_up_proj`, `down_proj`, biases), each the row-wise concatenation of one or more stored
tensors or one row of a fused tensor. Two ways to fill a slot:

* **in place**: where the pieces of every part follow each other in the file (as in most checkpoints, where an expert's
  tensors are neighbours), whole runs of bytes are read straight into the slot. A run starts at the slot offset that
  has the file offset's remainder modulo the page, so that a direct read can land there without a bounce.

      file   ...|....gate.......up..........down.....|...       page boundaries: |
      slot      |....gate.......up..........down.....|          same remainder, nothing is moved

* **staged**: otherwise (Mixtral's w1, w2, w3, where gate and up are not neighbours; another dtype; fp32 at an odd
  address; codes and scales apart) runs are read into a buffer of the reading thread and the pieces are copied, and
  converted, to the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from smoe.errors import CheckpointError
from smoe.formats.registry import FORMATS
from smoe.memory.arrangement import SlotArrangement
from smoe.memory.safetensors_index import ITEM_BYTES, FileIdentity, StoredTensor

EXPERT_DTYPES = ("BF16", "F16", "F32")
"""As safetensors names them: what experts may be stored in, and what slots may hold."""
PAGE = 4096
"""Alignment of buffers, offsets and lengths for direct reads; devices with smaller sectors accept it too. Larger pages
of memory, as macOS on ARM has them, ask for no more: what reads are aligned to is the disk's sectors."""


STAGED_BYTES = 4 * 2**20
"""Staged experts pass through a buffer of this size (and two pages), piece by piece."""
_BITS = {2: np.uint16, 4: np.uint32}
_INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
"""The bits of infinity; NaNs have more, and with the sign bit set so have their negatives."""
MATRIX_ALIGNMENT = 64
"""Where matrix kernels expect weights to begin. MKL's fp32 products change their last bits with the address
(docs/log/kernels.md), oneDNN's bf16 ones do not; so only bf16 experts may lie wherever the file's offset puts them."""


def page_ceil(count: int) -> int:
    """`count` bytes rounded up to whole pages."""
    return -(-count // PAGE) * PAGE


class Read(NamedTuple):
    """One read: `file[offset : offset + nbytes]` into the buffer at `target`; all three are multiples of the page.

    `need` bytes must come; less only happens at the end of the file.
    """

    path: Path
    offset: int
    nbytes: int
    target: int
    need: int


class StoredRun(NamedTuple):
    """A run of elements of one stored tensor: read into a staging buffer, then copied, and converted, into the slot."""

    read: Read
    source: int
    """Where in the buffer the elements begin."""
    nbytes: int
    dtype: str
    """As stored."""
    target: int
    """Where in the slot they belong; with an arrangement, where the first byte of the tensor does."""
    arrangement: SlotArrangement | None = None
    """None: one behind the other."""
    begin: int = 0
    """With an arrangement: bytes of the tensor before these."""


class SlotLayout(NamedTuple):
    """How one expert gets into a slot: by reads straight into it, piece by piece through a staging buffer, or both."""

    reads: tuple[Read, ...]
    """Straight into the slot."""
    parts: dict[str, int]
    """Slot offset of every part in bytes."""
    pieces: tuple[StoredRun, ...]
    """Through a staging buffer, after the reads: these write whole pages."""
    nbytes: int
    """Bytes of weights; of an expert that is read in place, alignment is not counted."""
    layout: int
    """Equal for experts whose parts have the same shapes and offsets: few occur, so views of a slot can be cached by
    it."""
    slot_bytes: int
    """Room that it needs in the slot."""

    @property
    def staging_bytes(self) -> int:
        """Room that its largest piece needs in the staging buffer."""
        return max((piece.read.nbytes for piece in self.pieces), default=0)


@dataclass(frozen=True)
class Part:
    """One weight of every expert of a layer: shape without the expert dimension."""

    name: str
    shape: tuple[int, ...]
    """As the library has it."""
    is_turned: bool = False
    """Stored the other way round, row by column."""
    takes_turns: bool = False
    """Stored in two pieces, the gate's rows and the up's, that the library has in turns: gate, up, gate, up, ..."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.is_turned else self.shape


@dataclass(frozen=True)
class StoredLayer:
    """The routed experts of one layer: `sources[expert][part]` are the stored pieces in row order.

    Raises `CheckpointError` where they are not of the parts' shapes.
    """

    layer: int
    parts: tuple[Part, ...]
    sources: Sequence[Mapping[str, tuple[StoredTensor, ...]]]

    def __post_init__(self) -> None:
        for expert, sources in enumerate(self.sources):
            for part in self.parts:
                _check_part(f"layer {self.layer}, expert {expert}", part, sources.get(part.name, ()))

    @property
    def experts(self) -> int:
        return len(self.sources)


class ExpertStore:
    """Placements of all routed experts of one checkpoint (or packed file) at one dtype.

    `item_bytes` is the element size in the slots, `dtype` the safetensors name of the slots' dtype; `alignment` is what
    the kernels of the device ask of a weight's address (None: what they ask on a CPU).
    """

    def __init__(self, layers: Mapping[int, StoredLayer], dtype: str, alignment: int | None = None) -> None:
        self.layers = dict(layers)
        self.dtype = dtype
        self.item_bytes = ITEM_BYTES.get(dtype, 1)
        self._alignment = alignment or (self.item_bytes if dtype == "BF16" else MATRIX_ALIGNMENT)
        self._piece_alignment = max(self._alignment, MATRIX_ALIGNMENT)
        self._placements: dict[tuple[int, int], SlotLayout] = {}
        self._layouts: dict[tuple[object, ...], int] = {}
        in_place = [self._in_place(layer, expert) for layer, expert in self.keys()]
        self.is_staged = any(placement is None for placement in in_place)
        for key, placement in zip(self.keys(), in_place, strict=True):
            self._placements[key] = placement if placement and not self.is_staged else self._staged(*key)
        placements = self._placements.values()
        self.slot_bytes: dict[int, int] = {}
        """What a slot for any expert of a layer must have."""
        for (layer, _), p in self._placements.items():
            self.slot_bytes[layer] = max(page_ceil(p.slot_bytes), self.slot_bytes.get(layer, 0))
        self.staging_buffer_bytes = max(p.staging_bytes for p in placements)
        self.expert_bytes = max(p.nbytes for p in placements)
        self.total_bytes = sum(p.nbytes for p in placements)

    def keys(self) -> list[tuple[int, int]]:
        """(layer, expert) of every routed expert, ascending."""
        return [(n, e) for n in sorted(self.layers) for e in range(self.layers[n].experts)]

    def placement(self, layer: int, expert: int) -> SlotLayout:
        return self._placements[layer, expert]

    def reads(self, layer: int, expert: int) -> list[Read]:
        """All that bringing one expert in asks of the disk."""
        placement = self._placements[layer, expert]
        return [*placement.reads, *(piece.read for piece in placement.pieces)]

    def paths(self) -> list[Path]:
        """The files that hold experts."""
        return sorted({tensor.path for tensor in self._tensors()})

    def check_finite(self, layer: int, expert: int, placement: SlotLayout, buffer: memoryview) -> None:
        """Raise `CheckpointError` where the weights in a filled buffer hold NaN or infinity."""
        self._check_parts(layer, expert, self.layers[layer].parts, placement, buffer)

    def _check_parts(
        self, layer: int, expert: int, parts: Iterable[Part], placement: SlotLayout, buffer: memoryview
    ) -> None:
        """`check_finite` of some parts, which are of the slots' dtype."""
        for part in parts:
            weights = np.frombuffer(buffer, _BITS[self.item_bytes], _elements(part.shape), placement.parts[part.name])
            if is_finite(weights, self.dtype):
                continue
            infinity = _INFINITY[self.dtype]
            tensor = self.tensor_at(layer, expert, part.name, int(np.argmax((weights & infinity) == infinity)))
            raise CheckpointError(
                f"{tensor.path}: {tensor.key!r} ({part.name} of expert {expert} in layer {layer}) holds NaN or "
                f"infinity in {self.dtype}; download the checkpoint again"
            )

    def tensor_at(self, layer: int, expert: int, part: str, element: int) -> StoredTensor:
        """The stored tensor that holds an element of a part, counted row by row."""
        for tensor in self.layers[layer].sources[expert][part]:
            if element < _elements(tensor.shape):
                return tensor
            element -= _elements(tensor.shape)
        raise IndexError(element)

    def identities(self) -> dict[Path, FileIdentity]:
        """The files that hold experts, as they were when they were indexed."""
        return {tensor.path: tensor.identity for tensor in self._tensors() if tensor.identity is not None}

    def _tensors(self) -> Iterator[StoredTensor]:
        for layer in self.layers.values():
            for parts in layer.sources:
                for tensor in (tensor for tensors in parts.values() for tensor in tensors):
                    yield from (each.tensor for each in tensor.made_of) if tensor.made_of else (tensor,)

    def _layout(self, experts: StoredLayer, parts: Mapping[str, int]) -> int:
        return self._layouts.setdefault((experts.parts, *parts.items()), len(self._layouts))

    def _in_place(self, layer: int, expert: int) -> SlotLayout | None:
        experts = self.layers[layer]
        sources = experts.sources[expert]
        spans: dict[str, tuple[Path, int, int]] = {}
        for part in experts.parts:
            span = _joined(sources[part.name], self.dtype)
            if span is None:
                return None
            spans[part.name] = span
        runs = runs_of(list(spans.values()))
        reads, starts = reads_of(runs)
        parts = {name: locate(span, runs, starts) for name, span in spans.items()}
        if any(offset % self._alignment for offset in parts.values()):
            return None
        nbytes = sum(length for _, _, length in spans.values())
        return SlotLayout(reads, parts, (), nbytes, self._layout(experts, parts), reads[-1].target + reads[-1].nbytes)

    def _staged(self, layer: int, expert: int) -> SlotLayout:
        experts = self.layers[layer]
        parts: dict[str, int] = {}
        pieces: list[StoredRun] = []
        target = 0
        for part in experts.parts:
            parts[part.name] = target
            for tensor in experts.sources[expert][part.name]:
                pieces += pieces_of(tensor, target, self.item_bytes)
                target += _elements(tensor.shape) * self.item_bytes
            target = -(-target // self._piece_alignment) * self._piece_alignment
        return SlotLayout((), parts, tuple(pieces), target, self._layout(experts, parts), target)


def is_finite(bits: npt.NDArray[np.unsignedinteger[Any]], dtype: str) -> bool:
    """Whether weights, given as the unsigned integers that their bits are, hold neither NaN nor infinity.

    Two maxima, no copy: seen as unsigned, whatever is negative and not finite is at the top; seen as signed, whatever
    is positive and not finite. 0.25 ms for an expert of 9.4 MB, with the interpreter lock released
    (docs/log/kernels.md).
    """
    infinity, sign = _INFINITY[dtype], 1 << (8 * bits.itemsize - 1)
    signed = bits.view(np.int16 if bits.itemsize == 2 else np.int32)
    return not bits.size or (int(bits.max()) < infinity | sign and int(signed.max()) < infinity)


def _check_part(whose: str, part: Part, tensors: Sequence[StoredTensor]) -> None:
    """Raise `CheckpointError` unless the tensors, one below the other, are the part: element counts alone would let a
    transposed matrix pass."""
    shape = part.stored_shape
    for tensor in tensors:
        if tensor.dtype not in (*EXPERT_DTYPES, *FORMATS):
            raise CheckpointError(
                f"{tensor.path}: {tensor.key!r} ({whose}: {part.name}) is {tensor.dtype}; smoe reads experts in "
                f"{', '.join((*EXPERT_DTYPES, *FORMATS))}"
            )
        if len(tensor.shape) != len(shape) or tensor.shape[1:] != shape[1:]:
            raise CheckpointError(
                f"{tensor.path}: {tensor.key!r} has the shape {list(tensor.shape)}, but {whose}: "
                f"{part.name} is {list(shape)} by config.json; download the checkpoint again"
            )
    rows, wanted = sum(tensor.shape[0] for tensor in tensors), shape[0]
    if rows != wanted:
        where = f"{tensors[0].path}: {tensors[0].key!r} and what belongs to it are" if tensors else "the checkpoint has"
        raise CheckpointError(
            f"{where} {rows} rows, but {whose}: {part.name} has {wanted} by config.json; download it again"
        )


def pieces_of(tensor: StoredTensor, target: int, item_bytes: int) -> list[StoredRun]:
    """A tensor in pieces of at most `STAGED_BYTES`: a reading thread's buffer stays small, whatever the expert.

    `item_bytes` are those of an element in the slot.
    """
    stored_item = ITEM_BYTES[tensor.dtype]
    return [
        StoredRun(*_piece(tensor, begin, STAGED_BYTES), tensor.dtype, target + begin // stored_item * item_bytes)
        for begin in range(0, tensor.nbytes, STAGED_BYTES)
    ]


def arranged_pieces(tensor: StoredTensor, target: int, arrangement: SlotArrangement) -> list[StoredRun]:
    """The same of a tensor whose bytes an arrangement brings to their places, from `target` on; larger pieces where it
    wants more at once."""
    most = max(1, STAGED_BYTES // arrangement.unit) * arrangement.unit
    return [
        StoredRun(*_piece(tensor, begin, most), tensor.dtype, target, arrangement, begin)
        for begin in range(0, tensor.nbytes, most)
    ]


def _piece(tensor: StoredTensor, begin: int, most: int) -> tuple[Read, int, int]:
    """(read, where in its buffer the piece begins, bytes of it)"""
    offset, nbytes = tensor.offset + begin, min(most, tensor.nbytes - begin)
    shift = offset % PAGE
    return Read(tensor.path, offset - shift, page_ceil(shift + nbytes), 0, shift + nbytes), shift, nbytes


def row_of(tensor: StoredTensor, row: int) -> StoredTensor:
    """Row `row` of a fused tensor [E, ...] as a stored tensor of its own."""
    nbytes = tensor.nbytes // tensor.shape[0]
    made_of = tuple(each._replace(tensor=row_of(each.tensor, row)) for each in tensor.made_of)
    return replace(tensor, offset=tensor.offset + row * nbytes, nbytes=nbytes, shape=tensor.shape[1:], made_of=made_of)


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _joined(tensors: Sequence[StoredTensor], dtype: str) -> tuple[Path, int, int] | None:
    """The one byte range that the tensors fill in order, or None."""
    first = tensors[0]
    end = first.offset
    for tensor in tensors:
        if tensor.path != first.path or tensor.offset != end or tensor.dtype != dtype:
            return None
        end += tensor.nbytes
    return first.path, first.offset, end - first.offset


def runs_of(spans: Sequence[tuple[Path, int, int]]) -> list[tuple[Path, int, int]]:
    """Byte ranges merged where one ends and the next begins, in file order."""
    merged: list[tuple[Path, int, int]] = []
    for path, offset, length in sorted(spans):
        if merged and merged[-1][0] == path and merged[-1][1] + merged[-1][2] == offset:
            merged[-1] = (path, merged[-1][1], merged[-1][2] + length)
        else:
            merged.append((path, offset, length))
    return merged


def reads_of(runs: Sequence[tuple[Path, int, int]]) -> tuple[tuple[Read, ...], list[int]]:
    """Page-aligned reads that cover the runs, one after the other, and where each run's first byte lands."""
    reads: list[Read] = []
    starts: list[int] = []
    target = 0
    for path, offset, length in runs:
        shift = offset % PAGE
        size = page_ceil(shift + length)
        reads.append(Read(path, offset - shift, size, target, shift + length))
        starts.append(target + shift)
        target += size
    return tuple(reads), starts


def locate(span: tuple[Path, int, int], runs: Sequence[tuple[Path, int, int]], starts: Sequence[int]) -> int:
    """Buffer offset of a span that lies inside one of the runs."""
    path, offset, length = span
    for (run_path, run_offset, run_length), start in zip(runs, starts, strict=True):
        if run_path == path and run_offset <= offset and offset + length <= run_offset + run_length:
            return start + offset - run_offset
    raise AssertionError(f"{span} lies in none of {runs}")
