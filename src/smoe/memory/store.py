"""The expert store: where every routed expert is on disk, and which layout it has in a slot.

An expert has *parts*: `gate_up_proj`, `down_proj` and biases. A part is the row-wise concatenation of one or more
stored tensors, or one row of a fused tensor. There are two ways to read an expert into a slot:

* **In place**, if the tensors of every part follow each other in the file. In most checkpoints the tensors of an expert
  are neighbours. Whole byte ranges are then read directly into the slot. A range starts at a slot offset that equals
  the file offset modulo the page size, so a direct read needs no additional copy:

    file   ...|....gate.......up..........down.....|...       page boundaries: |
    slot      |....gate.......up..........down.....|          same remainder, nothing is moved

* **Staged** otherwise: Mixtral's w1, w2, w3, where gate and up are not neighbours; another dtype; fp32 at an odd
  address; separate codes and scales. Ranges are read into a buffer of the reading thread, and their chunks are copied
  or converted to the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from smoe.errors import CheckpointError
from smoe.formats.registry import FORMATS
from smoe.memory.arrangement import SlotArrangement
from smoe.memory.expert_files import FileIdentity
from smoe.memory.safetensors_index import ITEM_BYTES, StoredTensor

EXPERT_DTYPES = ("BF16", "F16", "F32")
"""The safetensors names of the dtypes that unquantized experts may have in files and in slots."""
PAGE = 4096
"""The alignment of buffers, offsets and lengths for direct reads, in bytes. It is a multiple of all common sector
sizes. Memory pages may be larger, as on macOS on ARM, which does not matter."""


STAGED_BYTES = 4 * 2**20
"""The size of a chunk for staged experts. The staging buffer has this size plus two pages."""
_BITS = {2: np.uint16, 4: np.uint32}
_INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
"""The bits of positive infinity. Those of NaN are larger numbers, and negative values also have the sign bit."""
MATRIX_ALIGNMENT = 64
"""The alignment in bytes that matrix kernels need. The last bits of MKL's fp32 products depend on the address
(docs/log/kernels.md), those of oneDNN's bf16 products do not. So only bf16 experts may be at any address."""


def page_ceil(count: int) -> int:
    """Return `count` bytes, rounded up to a multiple of `PAGE` bytes."""
    return -(-count // PAGE) * PAGE


class Read(NamedTuple):
    """One read from disk: `file[offset : offset + nbytes]` into a buffer, from the buffer's offset `target` on.
    `offset`, `nbytes` and `target` are multiples of `PAGE`.

    At least `need` bytes must arrive. Fewer than `nbytes` arrive only at the end of the file.
    """

    path: Path
    offset: int
    nbytes: int
    target: int
    need: int


class StoredRun(NamedTuple):
    """A chunk of one stored tensor. It is read into a staging buffer, and copied or converted from there into the
    slot."""

    read: Read
    source: int
    """The offset of the chunk's elements in the staging buffer."""
    nbytes: int
    dtype: str
    """The dtype in the file."""
    target: int
    """The offset in the slot. With an arrangement: the slot offset of the whole tensor's first byte."""
    arrangement: SlotArrangement | None = None
    """The conversion into blocks; None for consecutive elements."""
    begin: int = 0
    """With an arrangement: the offset of this chunk within the tensor."""


class SlotLayout(NamedTuple):
    """How one expert is read into a slot: directly, in chunks through a staging buffer, or both."""

    reads: tuple[Read, ...]
    """The reads that go directly into the slot."""
    parts: dict[str, int]
    """The offset of every part in the slot, in bytes."""
    pieces: tuple[StoredRun, ...]
    """The chunks that go through a staging buffer. They are copied after the reads, because a read overwrites whole
    pages."""
    nbytes: int
    """The number of bytes of weights, without the bytes for alignment of an expert that is read in place."""
    layout: int
    """A number that is equal for experts with the same shapes and offsets. There are few such numbers, so the views of
    slots are cached by it."""
    slot_bytes: int
    """The number of bytes that the expert occupies in the slot."""

    @property
    def staging_bytes(self) -> int:
        """The number of bytes that the largest piece needs in the staging buffer."""
        return max((piece.read.nbytes for piece in self.pieces), default=0)


@dataclass(frozen=True)
class Part:
    """One weight tensor that every expert of a layer has. Its shapes have no expert dimension."""

    name: str
    shape: tuple[int, ...]
    """The weight's shape in transformers, without the expert dimension."""
    is_turned: bool = False
    """Whether the file stores the matrix transposed."""
    takes_turns: bool = False
    """Whether transformers interleaves the rows of gate and up, which the file stores separately."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the weight in the file."""
        return self.shape[::-1] if self.is_turned else self.shape


class FusedExperts(Sequence[Mapping[str, tuple[StoredTensor, ...]]]):
    """The stored tensors of a layer's experts (`StoredLayer.sources`) that are all rows of fused tensors [E, ...]. Rows
    are made on demand: a forecast of a model with thousands of experts needs few of them."""

    def __init__(self, experts: int, tensors: Mapping[str, tuple[StoredTensor, ...]]) -> None:
        """`experts`: E, the number of experts. `tensors`: the fused tensors of every weight, in the order of its
        rows."""
        self._experts = range(experts)
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._experts)

    @overload
    def __getitem__(self, expert: int) -> dict[str, tuple[StoredTensor, ...]]: ...
    @overload
    def __getitem__(self, expert: slice) -> list[dict[str, tuple[StoredTensor, ...]]]: ...
    def __getitem__(self, expert: int | slice) -> Any:
        if isinstance(expert, slice):
            return [self[each] for each in self._experts[expert]]
        row = self._experts[expert]
        return {name: tuple(row_of(tensor, row) for tensor in fused) for name, fused in self._tensors.items()}

    @property
    def period(self) -> int:
        """The smallest number of experts after which the offsets of all rows have the same remainders by `PAGE`; at
        most E."""
        fused = [tensor for of_part in self._tensors.values() for tensor in of_part]
        if any(tensor.made_of for tensor in fused):
            return len(self)
        return min(len(self), lcm(*(PAGE // gcd(PAGE, tensor.nbytes // tensor.shape[0]) for tensor in fused)))


@dataclass(frozen=True)
class StoredLayer:
    """The routed experts of one layer. `sources[expert][name]` are the stored tensors that together form the weight
    `name`, in the order of its rows.

    Raises `CheckpointError` if the tensors do not have the shapes in `parts`.
    """

    layer: int
    parts: tuple[Part, ...]
    sources: Sequence[Mapping[str, tuple[StoredTensor, ...]]]

    def __post_init__(self) -> None:
        for expert in self.samples:
            sources = self.sources[expert]
            for part in self.parts:
                _check_part(f"layer {self.layer}, expert {expert}", part, sources.get(part.name, ()))

    @property
    def experts(self) -> int:
        return len(self.sources)

    @property
    def samples(self) -> range:
        """The first experts, 0 to n - 1. Every expert e is stored like expert e modulo n: in the same files and
        formats, with the same shapes, and with the same remainders of all offsets by `PAGE`."""
        return range(self.sources.period if isinstance(self.sources, FusedExperts) else len(self.sources))


class ExpertStore:
    """The slot layouts of all routed experts of one checkpoint, or of one packed file, in one dtype.

    `dtype`: the safetensors name of the dtype in slots; `item_bytes`: the size of an element. `alignment`: the
    alignment in bytes that the device's kernels need for the address of a weight; None: the alignment that the CPU's
    kernels need.
    """

    def __init__(self, layers: Mapping[int, StoredLayer], dtype: str, alignment: int | None = None) -> None:
        self.layers = dict(layers)
        self.dtype = dtype
        self.item_bytes = ITEM_BYTES.get(dtype, 1)
        self._alignment = alignment or (self.item_bytes if dtype == "BF16" else MATRIX_ALIGNMENT)
        self._piece_alignment = max(self._alignment, MATRIX_ALIGNMENT)
        self._placements: dict[tuple[int, int], SlotLayout] = {}
        self._layouts: dict[tuple[object, ...], int] = {}
        samples = [(layer, expert) for layer in sorted(self.layers) for expert in self.layers[layer].samples]
        in_place = [self._in_place(*key) for key in samples]
        self.is_staged = None in in_place
        for key, placement in zip(samples, in_place, strict=True):
            self._placements[key] = placement if placement and not self.is_staged else self._staged(*key)
        placements = self._placements.values()
        self.slot_bytes: dict[int, int] = {}
        """The number of bytes of a slot that can hold any expert of a layer, by layer."""
        self.total_bytes = 0
        for (layer, expert), p in self._placements.items():
            self.slot_bytes[layer] = max(page_ceil(p.slot_bytes), self.slot_bytes.get(layer, 0))
            alike = range(expert, self.layers[layer].experts, len(self.layers[layer].samples))
            self.total_bytes += p.nbytes * len(alike)
        self.staging_buffer_bytes = max(p.staging_bytes for p in placements)
        self.expert_bytes = max(p.nbytes for p in placements)

    def keys(self) -> list[tuple[int, int]]:
        """Return (layer, expert) of every routed expert, in ascending order."""
        return [(n, e) for n in sorted(self.layers) for e in range(self.layers[n].experts)]

    def placement(self, layer: int, expert: int) -> SlotLayout:
        """Return how an expert is read into a slot: its reads, the offsets of its weights, and the chunks that are
        converted."""
        key = layer, expert
        if key not in self._placements:  # its layout has a number already, that of its sample
            placement = None if self.is_staged else self._in_place(layer, expert)
            self._placements[key] = placement or self._staged(layer, expert)
        return self._placements[key]

    def reads(self, layer: int, expert: int) -> list[Read]:
        """Return all reads from disk that load one expert."""
        placement = self.placement(layer, expert)
        return [*placement.reads, *(piece.read for piece in placement.pieces)]

    def paths(self) -> list[Path]:
        """Return the paths of all files that contain experts."""
        return sorted({tensor.path for tensor in self._tensors()})

    def check_finite(self, layer: int, expert: int, placement: SlotLayout, buffer: memoryview) -> None:
        """Raise `CheckpointError` if the weights of an expert that was read into `buffer` contain NaN or infinity."""
        self._check_parts(layer, expert, self.layers[layer].parts, placement, buffer)

    def _check_parts(
        self, layer: int, expert: int, parts: Iterable[Part], placement: SlotLayout, buffer: memoryview
    ) -> None:
        """Raise `CheckpointError` if one of the weights `parts` of an expert contains NaN or infinity. These weights
        must have the dtype of slots."""
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
        """Return the stored tensor that contains element number `element` of an expert's weight `part`. Elements are
        counted row by row through the whole weight."""
        for tensor in self.layers[layer].sources[expert][part]:
            if element < _elements(tensor.shape):
                return tensor
            element -= _elements(tensor.shape)
        raise IndexError(element)

    def identities(self) -> dict[Path, FileIdentity]:
        """Return the files that contain experts, each with its identity at the time when it was indexed."""
        return {tensor.path: tensor.identity for tensor in self._tensors() if tensor.identity is not None}

    def _tensors(self) -> Iterator[StoredTensor]:
        """Yield the stored tensors of the sampled experts. All files have one of them."""
        for layer in self.layers.values():
            for expert in layer.samples:
                for tensor in (tensor for tensors in layer.sources[expert].values() for tensor in tensors):
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
    """Return whether weights contain neither NaN nor infinity. `bits`: the weights' bits as unsigned integers; `dtype`:
    their safetensors dtype.

    The check compares two maxima, without a copy. As unsigned integers, negative non-finite values are the largest; as
    signed integers, positive non-finite values are. It takes 0.25 ms for an expert of 9.4 MB and releases the
    interpreter lock (docs/log/kernels.md).
    """
    infinity, sign = _INFINITY[dtype], 1 << (8 * bits.itemsize - 1)
    signed = bits.view(np.int16 if bits.itemsize == 2 else np.int32)
    return not bits.size or (int(bits.max()) < infinity | sign and int(signed.max()) < infinity)


def _check_part(whose: str, part: Part, tensors: Sequence[StoredTensor]) -> None:
    """Raise `CheckpointError` unless the tensors, concatenated, have the shape of the weight `part`. Comparing only the
    number of elements would accept a transposed matrix."""
    shape = part.stored_shape
    for tensor in tensors:
        if tensor.dtype not in (*EXPERT_DTYPES, *FORMATS):
            raise CheckpointError(
                f"{tensor.path}: the tensor {tensor.key!r} ({whose}: {part.name}) has the data type {tensor.dtype}; "
                f"smoe reads experts in {', '.join((*EXPERT_DTYPES, *FORMATS))}"
            )
        if len(tensor.shape) != len(shape) or tensor.shape[1:] != shape[1:]:
            raise CheckpointError(
                f"{tensor.path}: the tensor {tensor.key!r} has the shape {list(tensor.shape)}, but by config.json "
                f"{part.name} of {whose} has the shape {list(shape)}; download the checkpoint again"
            )
    rows, wanted = sum(tensor.shape[0] for tensor in tensors), shape[0]
    if rows != wanted:
        where = (
            f"{tensors[0].path}: {tensors[0].key!r} and the tensors of the same part have"
            if tensors
            else "the checkpoint has"
        )
        raise CheckpointError(
            f"{where} {rows} rows, but by config.json {part.name} of {whose} has {wanted} rows; download the "
            "checkpoint again"
        )


def pieces_of(tensor: StoredTensor, target: int, item_bytes: int) -> list[StoredRun]:
    """Return a tensor as chunks of at most `STAGED_BYTES`, which limits the buffer of a reading thread.

    `target`: the tensor's offset in the slot; `item_bytes`: the size of an element in the slot.
    """
    stored_item = ITEM_BYTES[tensor.dtype]
    return [
        StoredRun(*_piece(tensor, begin, STAGED_BYTES), tensor.dtype, target + begin // stored_item * item_bytes)
        for begin in range(0, tensor.nbytes, STAGED_BYTES)
    ]


def arranged_pieces(tensor: StoredTensor, target: int, arrangement: SlotArrangement) -> list[StoredRun]:
    """Return the chunks of a tensor that `arrangement` converts. `target`: the tensor's offset in the slot. Every chunk
    is a multiple of the arrangement's unit."""
    most = max(1, STAGED_BYTES // arrangement.unit) * arrangement.unit
    return [
        StoredRun(*_piece(tensor, begin, most), tensor.dtype, target, arrangement, begin)
        for begin in range(0, tensor.nbytes, most)
    ]


def _piece(tensor: StoredTensor, begin: int, most: int) -> tuple[Read, int, int]:
    """Return how a chunk of a tensor is read: the read from disk, the chunk's offset in the staging buffer, and its
    size in bytes. The chunk begins at byte `begin` of the tensor."""
    offset, nbytes = tensor.offset + begin, min(most, tensor.nbytes - begin)
    shift = offset % PAGE
    return Read(tensor.path, offset - shift, page_ceil(shift + nbytes), 0, shift + nbytes), shift, nbytes


def row_of(tensor: StoredTensor, row: int) -> StoredTensor:
    """Return row `row` of a fused tensor [E, ...] as a stored tensor of its own."""
    nbytes = tensor.nbytes // tensor.shape[0]
    made_of = tuple(each._replace(tensor=row_of(each.tensor, row)) for each in tensor.made_of)
    return StoredTensor(  # `replace` would take twice as long, for thousands of experts
        tensor.path, tensor.offset + row * nbytes, nbytes, tensor.dtype, tensor.shape[1:], tensor.key, tensor.identity,
        made_of, tensor.scheme,
    )  # fmt: skip


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _joined(tensors: Sequence[StoredTensor], dtype: str) -> tuple[Path, int, int] | None:
    """Return the byte range that tensors fill together. Return None if the tensors do not follow each other in one
    file, or if a tensor has another dtype than `dtype`."""
    first = tensors[0]
    end = first.offset
    for tensor in tensors:
        if tensor.path != first.path or tensor.offset != end or tensor.dtype != dtype:
            return None
        end += tensor.nbytes
    return first.path, first.offset, end - first.offset


def runs_of(spans: Sequence[tuple[Path, int, int]]) -> list[tuple[Path, int, int]]:
    """Return the byte ranges `spans` in the order of the files, after joining ranges that follow each other
    directly."""
    merged: list[tuple[Path, int, int]] = []
    for path, offset, length in sorted(spans, key=lambda span: (str(span[0]), span[1])):  # paths compare slowly
        if merged and merged[-1][1] + merged[-1][2] == offset and merged[-1][0] == path:
            merged[-1] = (path, merged[-1][1], merged[-1][2] + length)
        else:
            merged.append((path, offset, length))
    return merged


def reads_of(runs: Sequence[tuple[Path, int, int]]) -> tuple[tuple[Read, ...], list[int]]:
    """Return page-aligned reads that bring the byte ranges `runs` into a buffer, one after the other, and the offset of
    each range in the buffer."""
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
    """Return the buffer offset of the byte range `span`, which is within one of the ranges `runs`. `starts`: the buffer
    offsets of `runs`."""
    path, offset, length = span
    for (run_path, run_offset, run_length), start in zip(runs, starts, strict=True):
        if run_offset <= offset and offset + length <= run_offset + run_length and run_path == path:
            return start + offset - run_offset
    raise AssertionError(f"the byte range {span} lies in none of the ranges {runs}")
