"""The packed expert file (pack) that `smoe pack` writes. In it, every expert is contiguous, page-aligned and in the
layout of a slot.

    for a folder        experts.int4.smoe in it
    for a GGUF file     model.gguf.experts.int4.smoe next to it, because a folder may hold several models
    for the embedded model, and where the folder is not writable: in the user's cache

    offset 0        8 bytes magic, 8 bytes little-endian header length, JSON header, zeros up to the next page
    then            experts in (layer, expert) order at a fixed stride, parts in order, zeros up to the stride
    then            JSON records of the layers (checksum, quantization error), their length in 8 bytes, the magic

An expert is read with one page-aligned read, directly into its slot. A file contains all experts in one of three forms.
*In a dtype*: useful if the checkpoint scatters an expert (gate and up apart, parts in several files) or has another
dtype. *As stored*: for quantized checkpoints, with codes and scales joined as in slots. *In fewer bits*: lossy, and
used only if the setting `precision` names it.

Quantized matrices have one output per row, even if transformers transposes them; biases have the model's own dtype. The
header contains a checksum of the checkpoint (`weight_samples.py`), and packs of other weights are refused. The file
gets its name only when it is complete (`smoe/packing`).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from smoe.bounds import PRECISION
from smoe.errors import CheckpointError, ConfigError, UnpreparedError, UnsupportedModelError
from smoe.expert import EXACT
from smoe.formats.registry import FORMATS, format_of
from smoe.memory.checkpoint_json import check_regular, parse_object
from smoe.memory.dtypes import Dtype
from smoe.memory.expert_files import FileIdentity, identity_of
from smoe.memory.gguf_header import part_stem
from smoe.memory.quantised_store import is_in_pieces, is_quantised
from smoe.memory.safetensors_index import ITEM_BYTES, StoredTensor
from smoe.memory.store import Part, StoredLayer, page_ceil
from smoe.models.files import DEMO_FOLDER
from smoe.models.outline import ExpertsSite
from smoe.models.spec import ModelSpec
from smoe.models.weight_samples import checksum
from smoe.units import format_bytes
from smoe.user_cache import of_model

MAGIC = b"smoepack"
VERSION = 3
AS_STORED = "stored"
"""The value of `Contents.name` for packs that keep a checkpoint's quantized values."""


class PackedPart(NamedTuple):
    """One weight of an expert in a packed file, with its dtype or quantized format."""

    part: Part
    kind: str
    """The dtype's safetensors name, or the name of the quantized format."""

    @property
    def nbytes(self) -> int:
        *rows, columns = self.part.stored_shape
        row_bytes = FORMATS[self.kind].row_bytes(columns) if self.is_quantised else columns * ITEM_BYTES[self.kind]
        return math.prod(rows) * row_bytes

    @property
    def is_quantised(self) -> bool:
        return self.kind in FORMATS


@dataclass(frozen=True)
class Contents:
    """The format and layout of the experts in a packed file."""

    name: str
    """A dtype's safetensors name (`BF16`), a precision (`int4`), or `AS_STORED` (`stored`)."""
    dtype: str
    """The dtype of unquantized parts, by its safetensors name; dequantized values have it too."""
    sites: Sequence[ExpertsSite]
    parts: Mapping[int, tuple[PackedPart, ...]]
    """The parts of an expert, by layer."""
    calibration: str | None = None
    """The id of the calibration text with which the weights were quantized; None without calibration. Readers ignore
    it."""

    @property
    def is_as_stored(self) -> bool:
        """Whether the quantized values are the checkpoint's own."""
        return self.name == AS_STORED

    @property
    def stride(self) -> int:
        """The number of bytes from the beginning of one expert to that of the next."""
        return page_ceil(max(map(self.expert_bytes, self.parts)))

    @property
    def experts(self) -> int:
        return sum(site.experts for site in self.sites)

    @property
    def nbytes(self) -> int:
        """The bytes of all experts, without the padding to whole pages."""
        return sum(site.experts * self.expert_bytes(site.layer) for site in self.sites)

    def expert_bytes(self, layer: int) -> int:
        return sum(part.nbytes for part in self.parts[layer])

    def places(self, layer: int) -> Iterator[tuple[PackedPart, int]]:
        """Yield each weight of an expert in the packed file, with its offset within the expert."""
        begin = 0
        for part in self.parts[layer]:
            yield part, begin
            begin += part.nbytes

    def path(self, place: Path) -> Path:
        """Return the path of the packed file of a checkpoint, as `pack_path` does."""
        return pack_path(place, self.name)

    def sidecar_name(self, place: Path) -> str:
        """Return the file name of this pack when it is stored next to the weights at `place`."""
        return _sidecar_name(place, self.name)

    def header(self, place: Path) -> dict[str, Any]:
        """Return the fields of the header that are known before packing, and that must be equal when the file is
        read."""
        layout = [
            [site.layer, site.experts, [[each.part.name, each.kind, list(each.part.stored_shape)] for each in parts]]
            for site in self.sites
            for parts in (self.parts[site.layer],)
        ]
        made_for = {} if self.calibration is None else {"calibration": self.calibration}
        return made_for | {
            "version": VERSION,
            "contents": self.name,
            "stride": self.stride,
            "layout": layout,
            "checkpoint": checksum(place),
        }


def pack_path(place: Path, name: str) -> Path:
    """Return the path of a checkpoint's packed file whose contents have this name, for reading or writing.

    The file is next to the weights. For the embedded model, or if the folder of the weights is not writable and has no
    packed file, it is in the user's cache.
    """
    sidecar = (place if place.is_dir() else place.parent) / _sidecar_name(place, name)
    if place.resolve() != DEMO_FOLDER.resolve() and (sidecar.exists() or os.access(sidecar.parent, os.W_OK)):
        return sidecar
    return of_model("packs", place).with_suffix(f".{_file_name(name)}")


def _sidecar_name(place: Path, name: str) -> str:
    return _file_name(name) if place.is_dir() else f"{part_stem(place.name)}.{_file_name(name)}"


def _file_name(name: str) -> str:
    return f"experts.{name.lower()}.smoe"


def contents_as_they_are(spec: ModelSpec, experts: Mapping[int, StoredLayer]) -> Contents | None:
    """Return the description of a packed file with the experts in their own precision: in the dtype of `spec`, or in
    their quantized formats. smoe uses such a file automatically.

    Return None if each quantized matrix is one contiguous tensor in the checkpoint already, or if its tensors cannot be
    joined.
    """
    if not is_quantised(experts):
        return contents_in_dtype(spec.sites, spec.dtype.stored)
    plain = spec.own_dtype.stored
    parts = {layer: [_as_stored(part, of, plain) for part in of.parts] for layer, of in experts.items()}
    found = {layer: tuple(part for part in of if part is not None) for layer, of in parts.items()}
    if any(len(found[layer]) < len(of) for layer, of in parts.items()):
        return None
    return Contents(AS_STORED, plain, spec.sites, found)


def _as_stored(part: Part, experts: StoredLayer, plain: str) -> PackedPart | None:
    """Return the form in which a packed file stores one weight of the experts. Return None unless all experts store the
    weight in the same quantized format, as separate codes and scales."""
    if len(part.shape) == 1:
        return PackedPart(part, plain)
    pieces = [piece for sample in experts.samples for piece in experts.sources[sample][part.name]]
    can_be_joined = all(is_in_pieces(piece) for piece in pieces) and not part.takes_turns
    return PackedPart(part, pieces[0].dtype) if can_be_joined and len({each.dtype for each in pieces}) == 1 else None


def contents_in_dtype(sites: Sequence[ExpertsSite], dtype: str) -> Contents:
    """Return contents with unquantized experts in a dtype, given by its safetensors name."""
    return Contents(
        dtype, dtype, sites, {site.layer: tuple(PackedPart(part, dtype) for part in site.parts) for site in sites}
    )


def contents_in_precision(sites: Sequence[ExpertsSite], precision: str, model_type: str, dtype: Dtype) -> Contents:
    """Return contents with quantized matrices. Biases have `dtype`; in a file that is the checkpoint's own.

    Raise `UnsupportedModelError` for weights that no format of the precision fits.
    """
    plain = dtype.stored
    parts = {}
    for site in sites:
        odd = [part.name for part in site.parts if not 1 <= len(part.shape) <= 2]
        if odd:
            raise UnsupportedModelError(
                f"experts of {model_type!r} have {odd[0]}, which is neither a matrix nor a bias; smoe "
                "quantises only experts of matrices and biases: leave `precision` out"
            )
        parts[site.layer] = tuple(_in_precision(precision, part, site, plain) for part in site.parts)
    return Contents(precision, plain, sites, parts)


def _in_precision(precision: str, part: Part, site: ExpertsSite, plain: str) -> PackedPart:
    """Return the form in which a packed file stores one weight of the experts: a matrix in the precision's format with
    one output per row, or a bias in the dtype `plain`."""
    if len(part.shape) == 1:
        return PackedPart(part, plain)
    turned = replace(part, is_turned=part.name in site.transposed)
    columns = turned.stored_shape[-1]
    form = format_of(precision, columns)
    if form is None:
        raise UnsupportedModelError(
            f"{part.name} of layer {site.layer} has rows of {columns} numbers, and {precision} takes multiples of 32"
        )
    return PackedPart(turned, form.name)


def check_takes_less(contents: Contents, spec: ModelSpec) -> None:
    """Raise `ConfigError` if the experts in a packed file with these contents would not be smaller than in the
    quantized checkpoint."""
    if contents.nbytes >= spec.experts_bytes:
        raise ConfigError(
            f"`precision={contents.name}` saves no memory: the experts would take {format_bytes(contents.nbytes)}, "
            f"and in the quantised form in which they are stored they take {format_bytes(spec.experts_bytes)}; give "
            "a lower precision, or leave out `precision`",
            setting="precision",
            given=contents.name,
            allowed="a precision of fewer bits than the file's own",
        )


def not_gatherable(why: str, allowed: str) -> ConfigError:
    """Return the error that packing experts in their own precision has no benefit. `allowed`: useful precisions."""
    return ConfigError(why, setting="precision", given=None, allowed=allowed)


class Packed(NamedTuple):
    """A packed file that was made from this checkpoint's weights."""

    path: Path
    layers: dict[int, StoredLayer]
    records: list[dict[str, Any]]
    """One record for each layer: the `sha256` of its experts, and for a precision the `relative_error` of its
    weights."""
    start: int
    """The offset of the first expert."""
    calibration: str | None
    """The id of the calibration text, as in `Contents`."""


def bytes_in_precision(spec: ModelSpec) -> dict[int, int]:
    """Return the bytes of an expert in a slot, by layer, in the precision of `spec`."""
    contents = contents_in_precision(spec.sites, spec.precision, spec.config.model_type, spec.dtype)
    return {layer: contents.expert_bytes(layer) for layer in contents.parts}


def experts_in_precision(place: Path, spec: ModelSpec) -> dict[int, StoredLayer]:
    """Return the locations of the experts in the packed file that has the precision of `spec`.

    Raises `UnpreparedError` if there is no such packed file, and `CheckpointError` as `read_packed` does.
    """
    contents = contents_in_precision(spec.sites, spec.precision, spec.config.model_type, spec.own_dtype)
    packed = read_packed(place, contents)
    if packed is None:
        raise not_packed(place, contents.name, "precision" if spec.form == EXACT else "low_precision")
    return packed.layers


def not_packed(place: Path, precision: str, setting: str) -> UnpreparedError:
    """Return the error that a checkpoint has no packed file in a precision. `setting`: precision or low_precision."""
    return UnpreparedError(
        f"`{setting}={precision}`: {pack_path(place, precision)} is not there; run smoe pack on {place} with "
        f"`precision={precision}` first",
        setting=setting,
        given=precision,
        allowed=f"{'auto' if setting == 'precision' else 'none'}, or a precision that the model has been packed in",
    )


def read_packed(place: Path, contents: Contents) -> Packed | None:
    """Return the packed file of a checkpoint with the described contents, or None if the file does not exist.

    Raises `CheckpointError` if the file belongs to other weights or is truncated.
    """
    path = contents.path(place)
    if not path.exists():
        return None
    check_regular(path)
    header, start, identity = _read_header(path)
    calibration = header.pop("calibration", None)
    _check_header(path, header, replace(contents, calibration=None).header(place))
    records, begin = _read_records(path, identity.nbytes)
    if begin != start + contents.experts * contents.stride or len(records) != len(contents.sites):
        raise CheckpointError(f"{path} is truncated; delete it, or run smoe pack again")
    layers: dict[int, StoredLayer] = {}
    offset = start
    for site in contents.sites:
        layers[site.layer] = _packed_layer(path, identity, site, contents, offset)
        offset += site.experts * contents.stride
    return Packed(path, layers, records, start, calibration)


def _check_header(path: Path, header: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise `CheckpointError` if a packed file has another format version, or was made from other weights than the
    checkpoint's."""
    if header.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is a packed file of version {header.get('version')!r:.20}, and this smoe reads version "
            f"{VERSION}: run smoe pack again, or delete the file"
        )
    if header != wanted:
        raise CheckpointError(
            f"{path} was packed from other weights: the names, sizes, headers or samples of the checkpoint's "
            f"files are not those that it was made of; run smoe pack again{_asked(wanted['contents'])}, or delete it"
        )


def _asked(contents: str) -> str:
    """Return the option of `smoe pack` that writes the contents with this name, as a text for messages."""
    return f" with `precision={contents}`" if contents in PRECISION else ""


def _packed_layer(
    path: Path, identity: FileIdentity, site: ExpertsSite, contents: Contents, offset: int
) -> StoredLayer:
    sources = []
    for expert in range(site.experts):
        begin = offset + expert * contents.stride
        pieces: dict[str, tuple[StoredTensor, ...]] = {}
        for each, at in contents.places(site.layer):
            key, shape = f"{site.name}.{each.part.name}[{expert}]", each.part.stored_shape
            pieces[each.part.name] = (StoredTensor(path, begin + at, each.nbytes, each.kind, shape, key, identity),)
        sources.append(pieces)
    return StoredLayer(site.layer, tuple(each.part for each in contents.parts[site.layer]), sources)


def may_be_packed(path: Path) -> bool:
    """Return whether a file may be overwritten: it is a packed file, or is empty after a crash."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) in (MAGIC, b"")


def header_bytes(header: dict[str, Any]) -> bytes:
    """Return the first pages of a packed file: magic number, header and padding."""
    text = json.dumps(header).encode()
    data = MAGIC + struct.pack("<Q", len(text)) + text
    return data + bytes(page_ceil(len(data)) - len(data))


def record_bytes(records: Sequence[dict[str, Any]]) -> bytes:
    """Return the last bytes of a packed file: the records of its layers, their length and the magic number."""
    text = json.dumps({"layers": list(records)}).encode()
    return text + struct.pack("<Q", len(text)) + MAGIC


def _read_records(path: Path, nbytes: int) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a packed file's layers, and the offset in the file at which the records begin."""
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
    """Return the header of a packed file, the offset of the first expert, and the identity of the file."""
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
