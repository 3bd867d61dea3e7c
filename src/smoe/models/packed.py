"""The packed expert file: every expert contiguous, page-aligned, in slot layout; made once by `smoe pack`.

    offset 0        8 bytes magic, 8 bytes little-endian header length, JSON header, zeros up to the next page
    then            experts in (layer, expert) order at a fixed stride, parts in order, zeros up to the stride

One read of whole pages brings an expert, with no bounce and no slack; worth it for checkpoints whose experts are
scattered (gate and up apart, an expert split between shards) or of another dtype. The header names the checkpoint's
shards with their sizes and times: a pack of other weights is refused, not used. The file appears under its name only
when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from smoe.errors import CheckpointError
from smoe.memory.checkpoint_json import check_regular, parse_object
from smoe.memory.dtypes import TORCH
from smoe.memory.safetensors_index import ITEM_BYTES, FileIdentity, StoredTensor, identity_of, shard_paths
from smoe.memory.store import ExpertStore, LayerExperts, page_ceil
from smoe.models.experts import ExpertsSite
from smoe.models.files import check_disk
from smoe.models.reference import reference_parameters
from smoe.whole_file import whole_file

MAGIC = b"smoepack"
VERSION = 1


def pack_path(folder: Path, dtype: str) -> Path:
    """Where the packed file of a checkpoint lies."""
    return folder / f"experts.{dtype.lower()}.smoe"


def packed_store(
    folder: Path, sites: Sequence[ExpertsSite], dtype: str, alignment: int | None = None
) -> ExpertStore | None:
    """The store over the packed file of `folder`, or None where there is none; raises where it does not fit the
    checkpoint."""
    path = pack_path(folder, dtype)
    if not path.exists():
        return None
    check_regular(path)
    header, start, identity = _read_header(path)
    expected = _header(folder, sites, dtype)
    if header != expected:
        raise CheckpointError(
            f"{path} was packed from other weights, or by another version; delete it, or run smoe pack again"
        )
    stride = header["stride"]  # ours, as the headers are equal
    experts = sum(site.experts for site in sites)
    if identity.nbytes != start + experts * stride:
        raise CheckpointError(f"{path} is truncated; delete it, or run smoe pack again")
    layers: dict[int, LayerExperts] = {}
    offset = start
    for site in sites:
        layers[site.layer] = _packed_layer(path, identity, site, dtype, offset, stride)
        offset += site.experts * stride
    return ExpertStore(layers, dtype, alignment)


def pack(folder: Path, sites: Sequence[ExpertsSite], store: ExpertStore, progress: Callable[[int, int], None]) -> Path:
    """Write the packed file of a checkpoint; `progress(done, total)` counts experts. Interrupted, it leaves nothing
    behind.

    Raises `DiskSpaceError` before it begins, `CheckpointError` for an expert with NaN or infinity.
    """
    path = pack_path(folder, store.dtype)
    header = _header(folder, sites, store.dtype)
    keys = store.keys()
    check_disk(folder, len(keys) * header["stride"], f"packing {folder.name}")
    with whole_file(path) as file:
        file.write(_header_bytes(header))
        for done, (layer, expert) in enumerate(keys, start=1):
            data = _expert_bytes(store.layers[layer], expert, store.dtype)
            file.write(data + bytes(header["stride"] - len(data)))
            progress(done, len(keys))
    return path


def _expert_bytes(experts: LayerExperts, expert: int, dtype: str) -> bytes:
    parameters = reference_parameters(experts, [expert], TORCH[dtype])
    for name, value in parameters.items():
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(
                f"{name} of expert {expert} in layer {experts.layer} holds NaN or infinity; download again"
            )
    return b"".join(parameters[part.name].contiguous().view(torch.uint8).numpy().tobytes() for part in experts.parts)


def _packed_layer(
    path: Path, identity: FileIdentity, site: ExpertsSite, dtype: str, offset: int, stride: int
) -> LayerExperts:
    sources = []
    for expert in range(site.experts):
        place = offset + expert * stride
        pieces: dict[str, tuple[StoredTensor, ...]] = {}
        for part in site.parts:
            nbytes = _part_bytes(part.shape, dtype)
            key = f"{site.name}.{part.name}[{expert}]"
            pieces[part.name] = (StoredTensor(path, place, nbytes, dtype, part.shape, key, identity),)
            place += nbytes
        sources.append(pieces)
    return LayerExperts(site.layer, site.parts, sources)


def _part_bytes(shape: Sequence[int], dtype: str) -> int:
    return ITEM_BYTES[dtype] * math.prod(shape)


def _header(folder: Path, sites: Sequence[ExpertsSite], dtype: str) -> dict[str, Any]:
    largest = max(sum(_part_bytes(part.shape, dtype) for part in site.parts) for site in sites)
    shards = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in shard_paths(folder)]
    layout = [[site.layer, site.experts, [[part.name, list(part.shape)] for part in site.parts]] for site in sites]
    return {
        "version": VERSION,
        "dtype": dtype,
        "stride": page_ceil(largest),
        "layout": layout,
        "checkpoint": hashlib.sha256(json.dumps(shards).encode()).hexdigest(),
    }


def _header_bytes(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    data = MAGIC + struct.pack("<Q", len(text)) + text
    return data + bytes(page_ceil(len(data)) - len(data))


def _read_header(path: Path) -> tuple[dict[str, Any], int, FileIdentity]:
    """The header, where the experts begin, and the file as it was."""
    with path.open("rb") as file:
        identity = identity_of(file.fileno())
        start = file.read(16)
        length = struct.unpack("<Q", start[8:])[0] if len(start) == 16 else 0
        text = file.read(length) if start[:8] == MAGIC and length < 1 << 26 else b""
    try:
        header = parse_object(text, path)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not a packed expert file; delete it, or run smoe pack again") from error
    return header, page_ceil(16 + length), identity
