"""The packed expert file: every expert contiguous, page-aligned, in slot layout; made once by `smoe pack`.

    offset 0        8 bytes magic, 8 bytes little-endian header length, JSON header, zeros up to the next page
    then            experts in (layer, expert) order at a fixed stride, parts in order, zeros up to the stride
    then            JSON records of the layers (checksum, what quantising cost), their length in 8 bytes, the magic

One read of whole pages brings an expert, with no bounce and no slack. A file has all experts in one form: in a dtype,
worth it for checkpoints whose experts are scattered (gate and up apart, an expert split between shards) or of another
dtype; or in fewer bits, which is asked for by name (`precision`) and lossy. The header has a checksum of the
checkpoint's headers and of samples of its weights (`weight_samples.py`): a pack of other weights is refused, not used.
The file appears under its name only when it is whole (`smoe/packing`).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from smoe.formats.registry import FORMATS, format_of
from smoe.memory.checkpoint_json import check_regular, parse_object
from smoe.memory.safetensors_index import ITEM_BYTES, FileIdentity, StoredTensor, identity_of
from smoe.memory.store import LayerExperts, Part, page_ceil
from smoe.models.experts import ExpertsSite
from smoe.models.weight_samples import checksum

MAGIC = b"smoepack"
VERSION = 3
_QUANTISABLE = {"gate_up_proj", "down_proj"}


class PackedPart(NamedTuple):
    """One weight of an expert as the file has it."""

    part: Part
    kind: str
    """The dtype's safetensors name, or the format's."""

    @property
    def nbytes(self) -> int:
        rows = math.prod(self.part.shape[:-1])
        if self.kind in FORMATS:
            return rows * FORMATS[self.kind].row_bytes(self.part.shape[-1])
        return rows * self.part.shape[-1] * ITEM_BYTES[self.kind]


@dataclass(frozen=True)
class Contents:
    """What a packed file has of every layer's experts, and where."""

    name: str
    """A dtype's safetensors name, or a precision: `BF16`, `int4`."""
    sites: Sequence[ExpertsSite]
    parts: Mapping[int, tuple[PackedPart, ...]]
    """By layer."""

    @property
    def stride(self) -> int:
        """From one expert to the next."""
        return page_ceil(max(map(self.expert_bytes, self.parts)))

    @property
    def experts(self) -> int:
        return sum(site.experts for site in self.sites)

    @property
    def nbytes(self) -> int:
        """All experts; the file is larger by what brings each to whole pages."""
        return sum(site.experts * self.expert_bytes(site.layer) for site in self.sites)

    def expert_bytes(self, layer: int) -> int:
        return sum(part.nbytes for part in self.parts[layer])

    def path(self, folder: Path) -> Path:
        """Where the packed file of a checkpoint lies, beside it."""
        return folder / f"experts.{self.name.lower()}.smoe"

    def header(self, folder: Path) -> dict[str, Any]:
        """All that is known before anything is packed, and that must be the same when it is read."""
        layout = [
            [site.layer, site.experts, [[each.part.name, each.kind, list(each.part.shape)] for each in parts]]
            for site in self.sites
            for parts in (self.parts[site.layer],)
        ]
        return {
            "version": VERSION,
            "contents": self.name,
            "stride": self.stride,
            "layout": layout,
            "checkpoint": checksum(folder),
        }


def contents_in_dtype(sites: Sequence[ExpertsSite], dtype: str) -> Contents:
    """The experts as they are, in a dtype by its safetensors name."""
    return Contents(dtype, sites, {site.layer: tuple(PackedPart(part, dtype) for part in site.parts) for site in sites})


def contents_in_precision(sites: Sequence[ExpertsSite], precision: str, model_type: str) -> Contents:
    """The experts in fewer bits. Raises `UnsupportedModelError` for weights that no format of the precision fits."""
    parts = {}
    for site in sites:
        if {part.name for part in site.parts} != _QUANTISABLE or any(len(part.shape) != 2 for part in site.parts):
            names = ", ".join(part.name for part in site.parts)
            raise UnsupportedModelError(
                f"experts of {model_type!r} are made of {names}, and smoe quantises those that are made of "
                "gate_up_proj and down_proj alone: leave `precision` out"
            )
        parts[site.layer] = tuple(PackedPart(part, _format_of(precision, part, site.layer)) for part in site.parts)
    return Contents(precision, sites, parts)


def _format_of(precision: str, part: Part, layer: int) -> str:
    form = format_of(precision, part.shape[-1])
    if form is None:
        raise UnsupportedModelError(
            f"{part.name} of layer {layer} has rows of {part.shape[-1]} numbers, and {precision} takes multiples of 32"
        )
    return form.name


def not_packable(place: Path, why: str, allowed: str) -> ConfigError:
    """There is nothing that packing the model at `place` could gather; `allowed`: what can be packed."""
    return ConfigError(why, setting="model", given=str(place), allowed=f"{allowed}, where it is to be packed")


class Packed(NamedTuple):
    """A packed file that fits its checkpoint."""

    path: Path
    layers: dict[int, LayerExperts]
    records: list[dict[str, Any]]
    """Of every layer: `sha256` of its experts, and of a precision the `relative_error` of its weights."""
    start: int
    """Where the experts begin."""


def read_packed(folder: Path, contents: Contents) -> Packed | None:
    """The packed file of `folder` with these contents, or None where there is none.

    Raises `CheckpointError` where it does not fit the checkpoint, or is cut short.
    """
    path = contents.path(folder)
    if not path.exists():
        return None
    check_regular(path)
    header, start, identity = _read_header(path)
    _check_header(path, header, contents.header(folder))
    records, begin = _read_records(path, identity.nbytes)
    if begin != start + contents.experts * contents.stride or len(records) != len(contents.sites):
        raise CheckpointError(f"{path} is truncated; delete it, or run smoe pack again")
    layers: dict[int, LayerExperts] = {}
    offset = start
    for site in contents.sites:
        layers[site.layer] = _packed_layer(path, identity, site, contents, offset)
        offset += site.experts * contents.stride
    return Packed(path, layers, records, start)


def _check_header(path: Path, header: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise `CheckpointError` where a pack is of another version, or of another checkpoint than the one beside it."""
    if header.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is a pack of version {header.get('version')!r:.20}, and this smoe reads version {VERSION}: run "
            "smoe pack again, or delete it"
        )
    if header != wanted:
        raise CheckpointError(
            f"{path} was packed from other weights: the names, sizes, headers or samples of the checkpoint's "
            "safetensors are not those that it was made of; run smoe pack again, or delete it"
        )


def _packed_layer(
    path: Path, identity: FileIdentity, site: ExpertsSite, contents: Contents, offset: int
) -> LayerExperts:
    sources = []
    for expert in range(site.experts):
        place = offset + expert * contents.stride
        pieces: dict[str, tuple[StoredTensor, ...]] = {}
        for each in contents.parts[site.layer]:
            key = f"{site.name}.{each.part.name}[{expert}]"
            stored = StoredTensor(path, place, each.nbytes, each.kind, each.part.shape, key, identity)
            pieces[each.part.name] = (stored,)
            place += each.nbytes
        sources.append(pieces)
    return LayerExperts(site.layer, site.parts, sources)


def header_bytes(header: dict[str, Any]) -> bytes:
    """The file's first pages."""
    text = json.dumps(header).encode()
    data = MAGIC + struct.pack("<Q", len(text)) + text
    return data + bytes(page_ceil(len(data)) - len(data))


def record_bytes(records: Sequence[dict[str, Any]]) -> bytes:
    """The file's end."""
    text = json.dumps({"layers": list(records)}).encode()
    return text + struct.pack("<Q", len(text)) + MAGIC


def _read_records(path: Path, nbytes: int) -> tuple[list[dict[str, Any]], int]:
    """The layers' records, and where they begin."""
    with path.open("rb") as file:
        file.seek(max(0, nbytes - 16))
        end = file.read(16)
        length = struct.unpack("<Q", end[:8])[0] if len(end) == 16 and end[8:] == MAGIC else 0
        begin = nbytes - 16 - length
        if not 0 < length < 1 << 26 or begin < 0:
            raise CheckpointError(f"{path} is truncated; delete it, or run smoe pack again")
        file.seek(begin)
        text = file.read(length)
    try:
        records = parse_object(text, path)["layers"]
    except (CheckpointError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged at its end; delete it, or run smoe pack again") from error
    return records, begin


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
