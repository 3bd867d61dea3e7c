"""Locates every tensor of a checkpoint by reading the headers of its safetensors files.

A safetensors file consists of an 8-byte little-endian header length, a JSON header, and the tensors' bytes;
`data_offsets` count from the end of the header. The headers are read here because the safetensors library does not give
byte ranges.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from smoe.errors import CheckpointError
from smoe.memory.checkpoint_json import check_regular, parse_object, read_object
from smoe.memory.expert_files import FileIdentity, identity_of

if TYPE_CHECKING:
    from smoe.memory.arrangement import SlotArrangement

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100 * 2**20

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2}
ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}
ITEM_BYTES |= {"U64": 8, "U32": 4, "U16": 2, "C64": 8}
_PACKED_DTYPES = ("F4", "F6_E2M3", "F6_E3M2")
"""dtypes whose elements are smaller than a byte. The sizes of such tensors are not checked here."""


class Ingredient(NamedTuple):
    """A stored tensor that is part of a quantized matrix, for example the matrix's codes or its scales."""

    tensor: StoredTensor
    place: int
    """The offset of the tensor's first byte from the beginning of the matrix in the slot."""
    arrangement: SlotArrangement | None
    """The conversion into blocks. None for an order of columns, which cannot be applied while loading."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint. Its bytes are `path[offset : offset + nbytes]`, row-major."""

    path: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    key: str = ""
    """The tensor's name in the file. A row of a fused tensor has the name of the fused tensor."""
    identity: FileIdentity | None = None
    """The identity of the file at the time when its header was read."""
    made_of: tuple[Ingredient, ...] = ()
    """All stored tensors of a quantized matrix with separate codes and scales, the codes first. In this case `dtype`
    and `shape` describe the matrix, and the other fields its codes."""
    scheme: str = ""
    """The quantization scheme of a matrix with separate codes and scales (`models/released_schemes.py`)."""

    @property
    def is_packed(self) -> bool:
        """Whether the tensor is in a file that `smoe pack` wrote."""
        return self.path.suffix == ".smoe"


def index_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint in `folder` by its name.

    Raises `CheckpointError` if files are missing or truncated, or contradict each other.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in shard_paths(folder):
        tensors.update(read_header(path))
    missing = _declared_keys(folder) - tensors.keys()
    if missing:
        raise CheckpointError(
            f"{folder / INDEX_FILE} names the tensor {sorted(missing)[0]!r}, which no shard holds; download the "
            "checkpoint again"
        )
    return tensors


def has_shards(folder: Path) -> bool:
    """Return whether all safetensors files of the checkpoint exist. The function reads none of them."""
    paths = _named_shards(folder)
    return bool(paths) and all(path.exists() for path in paths)


def _named_shards(folder: Path) -> list[Path]:
    """Return the paths of the safetensors files that the checkpoint names, whether they exist or not."""
    index = folder / INDEX_FILE
    if index.is_symlink() or index.exists():
        return [folder / name for name in sorted(set(_weight_map(index).values()))]
    return [folder / SINGLE_FILE] if (folder / SINGLE_FILE).exists() else []


def shard_paths(folder: Path) -> list[Path]:
    """Return the paths of the checkpoint's safetensors files. Raise `CheckpointError` if one of them is missing."""
    paths = _named_shards(folder)
    if not paths:
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; smoe reads folders of safetensors files, and "
            "GGUF files: give such a folder or file"
        )
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of {len(paths)} shards, beginning with {absent[0]}; download the "
            "checkpoint again"
        )
    for path in paths:
        check_regular(path)
    return paths


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by name, after checking them against the file's size."""
    check_regular(path)
    with path.open("rb") as file:
        identity = identity_of(file.fileno())
        size = identity.nbytes
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path} is not a safetensors file, or is truncated ({size} bytes); download it again"
            )
        header = parse_object(file.read(length), path)
    _check_metadata(path, header.pop("__metadata__", None))
    tensors = {key: _stored(path, key, entry, 8 + length, identity) for key, entry in header.items()}
    _check_order(path, tensors, 8 + length, size)
    return tensors


def _check_metadata(path: Path, metadata: Any) -> None:
    """Raise `CheckpointError` unless the metadata map names to strings, as the safetensors library requires."""
    is_text = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if metadata is not None and not is_text:
        raise CheckpointError(
            f"{path} has a corrupt header: a value in '__metadata__' is not a text; download it again"
        )


def _check_order(path: Path, tensors: dict[str, StoredTensor], base: int, size: int) -> None:
    """Raise `CheckpointError` unless the tensors fill the file without gap or overlap, as the safetensors library
    requires."""
    end, before = base, "the header"
    for key, tensor in sorted(tensors.items(), key=lambda entry: (entry[1].offset, entry[1].nbytes)):
        if tensor.offset != end:
            kind = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise CheckpointError(f"{path} has a corrupt entry for {key!r}: it {kind} {before}; download it again")
        end, before = end + tensor.nbytes, repr(key)
    if end > size:
        raise CheckpointError(
            f"{path} is truncated: it has {size} bytes, and its last tensor, {before}, ends at byte {end}; download "
            "it again"
        )
    if end < size:
        raise CheckpointError(
            f"{path} has {size - end} bytes too many after its last tensor, {before}; download it again"
        )


def _stored(path: Path, key: str, entry: Any, base: int, identity: FileIdentity) -> StoredTensor:
    try:
        begin, end = (_count(n) for n in entry["data_offsets"])
        shape = tuple(_count(n) for n in entry["shape"])
        dtype = entry["dtype"]
        nbytes = end - begin
        if nbytes < 0:
            raise ValueError("it ends before it begins")
        if not isinstance(dtype, str) or dtype not in (*ITEM_BYTES, *_PACKED_DTYPES):
            raise ValueError(f"there is no dtype {dtype!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a corrupt entry for {key!r}: {error}; download it again") from error
    expected = ITEM_BYTES.get(dtype, 0)
    for n in shape:
        expected *= n
    if dtype in ITEM_BYTES and expected != nbytes:
        raise CheckpointError(
            f"{path}: the tensor {key!r} of type {dtype} and shape {list(shape)} needs {expected} bytes, but "
            f"{nbytes} are stored; download it again"
        )
    return StoredTensor(path, base + begin, nbytes, dtype, shape, key, identity)


def _count(value: Any) -> int:
    """Return `value` if it is an integer from 0 to 2**63 - 1, else raise `ValueError`. For sizes and offsets."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is no size")
    return value


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} is corrupt: 'weight_map' names no weights; download it again")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _is_inside(name):
            raise CheckpointError(
                f"{index} is corrupt: it says that the tensor {key!r} is in {name!r:.80}, which is not a file of "
                "this folder; download it again"
            )
    return weight_map


def _is_inside(name: str) -> bool:
    """Return whether a file name refers to a file in the checkpoint's folder. The file may be a link, as in the hub's
    cache."""
    path = PurePosixPath(name)
    is_plain = 0 < len(name) < 256 and name.isprintable() and "\\" not in name
    return is_plain and not path.is_absolute() and ".." not in path.parts and path.suffix == ".safetensors"


def _declared_keys(folder: Path) -> set[str]:
    index = folder / INDEX_FILE
    return set(_weight_map(index)) if index.exists() else set()
