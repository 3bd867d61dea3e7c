"""The packed expert file: every expert contiguous, page-aligned, in slot layout; made once by `smoe pack`.

    of a folder        experts.int4.smoe in it
    of a GGUF file     model.gguf.experts.int4.smoe next to it, as a folder may hold several
    of either, where its folder cannot be written, and of the embedded model: in the user's cache

    offset 0        8 bytes magic, 8 bytes little-endian header length, JSON header, zeros up to the next page
    then            experts in (layer, expert) order at a fixed stride, parts in order, zeros up to the stride
    then            JSON records of the layers (checksum, what quantising cost), their length in 8 bytes, the magic

One read of whole pages brings an expert, with no bounce and no slack. A file has all experts in one form: in a dtype,
worth it for checkpoints whose experts are scattered (gate and up apart, an expert split between shards) or of another
dtype; as stored, of a quantised release, codes and scales brought together as slots have them; or in fewer bits, which
is asked for by name (`precision`) and lossy. Quantised matrices lie row by row of outputs, whichever way round the
library has them, and biases in the model's own type. The header has a checksum of the checkpoint's
headers and of samples of its weights (`weight_samples.py`): a pack of other weights is refused, not used. The file
appears under its name only when it is whole (`smoe/packing`).
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
from smoe.memory.gguf_header import part_stem
from smoe.memory.quantised_store import is_in_pieces, is_quantised
from smoe.memory.safetensors_index import ITEM_BYTES, FileIdentity, StoredTensor, identity_of
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
"""The name of contents that are a quantised release's own numbers."""


class PackedPart(NamedTuple):
    """One weight of an expert as the file has it."""

    part: Part
    kind: str
    """The dtype's safetensors name, or the format's."""

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
    """What a packed file has of every layer's experts, and where."""

    name: str
    """A dtype's safetensors name, a precision, or `AS_STORED`: `BF16`, `int4`, `stored`."""
    dtype: str
    """What is not quantised, by its safetensors name; quantised numbers are read as it, too."""
    sites: Sequence[ExpertsSite]
    parts: Mapping[int, tuple[PackedPart, ...]]
    """The parts by layer."""
    calibration: str | None = None
    """What it was quantised for, where it was for the inputs of a text: the text's mark. A reader does not mind."""

    @property
    def is_as_stored(self) -> bool:
        """Whether quantised numbers are the checkpoint's own."""
        return self.name == AS_STORED

    @property
    def stride(self) -> int:
        """Bytes from one expert to the next."""
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

    def places(self, layer: int) -> Iterator[tuple[PackedPart, int]]:
        """The parts of an expert, and where each begins in it: one behind the other."""
        begin = 0
        for part in self.parts[layer]:
            yield part, begin
            begin += part.nbytes

    def path(self, place: Path) -> Path:
        """Where the packed file of a checkpoint, a folder or a GGUF file, lies, or is to be written: next to its
        weights; in the user's cache where there is none and that folder cannot be written, and of the embedded
        model, whose folder is part of the installed program."""
        sidecar = (place if place.is_dir() else place.parent) / self.sidecar_name(place)
        if place.resolve() != DEMO_FOLDER.resolve() and (sidecar.exists() or os.access(sidecar.parent, os.W_OK)):
            return sidecar
        return of_model("packs", place).with_suffix(f".{self._own_name}")

    def sidecar_name(self, place: Path) -> str:
        """What the file is called where it lies next to the weights."""
        return self._own_name if place.is_dir() else f"{part_stem(place.name)}.{self._own_name}"

    @property
    def _own_name(self) -> str:
        return f"experts.{self.name.lower()}.smoe"

    def header(self, place: Path) -> dict[str, Any]:
        """All that is known before anything is packed, and that must be the same when it is read."""
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


def contents_as_they_are(spec: ModelSpec, experts: Mapping[int, StoredLayer]) -> Contents | None:
    """What a packed file has that is found by itself: the `experts` of a checkpoint as slots have them, in the dtype of
    `spec` or, where they are quantised, in the formats that they have. None of those that lie in one piece already, and
    of those that cannot."""
    if not is_quantised(experts):
        return contents_in_dtype(spec.sites, spec.dtype.stored)
    plain = spec.own_dtype.stored
    parts = {layer: [_as_stored(part, of, plain) for part in of.parts] for layer, of in experts.items()}
    found = {layer: tuple(part for part in of if part is not None) for layer, of in parts.items()}
    if any(len(found[layer]) < len(of) for layer, of in parts.items()):
        return None
    return Contents(AS_STORED, plain, spec.sites, found)


def _as_stored(part: Part, experts: StoredLayer, plain: str) -> PackedPart | None:
    """A matrix whose codes and scales lie apart, all of it in one format; a bias in the plain dtype."""
    if len(part.shape) == 1:
        return PackedPart(part, plain)
    pieces = [piece for sources in experts.sources for piece in sources[part.name]]
    can_be_joined = all(is_in_pieces(piece) for piece in pieces) and not part.takes_turns
    return PackedPart(part, pieces[0].dtype) if can_be_joined and len({each.dtype for each in pieces}) == 1 else None


def contents_in_dtype(sites: Sequence[ExpertsSite], dtype: str) -> Contents:
    """The experts as they are, in a dtype by its safetensors name."""
    return Contents(
        dtype, dtype, sites, {site.layer: tuple(PackedPart(part, dtype) for part in site.parts) for site in sites}
    )


def contents_in_precision(sites: Sequence[ExpertsSite], precision: str, model_type: str, dtype: Dtype) -> Contents:
    """The matrices of the experts in fewer bits, their biases in `dtype`, which is in the file the checkpoint's own.

    Raises `UnsupportedModelError` for weights that no format of the precision fits.
    """
    plain = dtype.stored
    parts = {}
    for site in sites:
        odd = [part.name for part in site.parts if not 1 <= len(part.shape) <= 2]
        if odd:
            raise UnsupportedModelError(
                f"experts of {model_type!r} have {odd[0]}, which is neither a matrix nor a bias, and smoe "
                "quantises those that are made of matrices and biases: leave `precision` out"
            )
        parts[site.layer] = tuple(_in_precision(precision, part, site, plain) for part in site.parts)
    return Contents(precision, plain, sites, parts)


def _in_precision(precision: str, part: Part, site: ExpertsSite, plain: str) -> PackedPart:
    """A matrix in the precision's format, turned so that a row is an output's; a bias in the plain dtype."""
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
    """Raise `ConfigError` where quantised experts are no smaller in these contents than in the checkpoint: such a copy
    is worse and saves nothing."""
    if contents.nbytes >= spec.experts_bytes:
        raise ConfigError(
            f"`precision` {contents.name}: the experts would take {format_bytes(contents.nbytes)}, and as they are "
            f"stored, quantised already, {format_bytes(spec.experts_bytes)}; give a lower precision, or use the model "
            "as it is",
            setting="precision",
            given=contents.name,
            allowed="a precision of fewer bits than the file's own",
        )


def not_gatherable(why: str, allowed: str) -> ConfigError:
    """Packing a model's experts as they are gains nothing; `allowed`: the precisions that it can be packed in."""
    return ConfigError(why, setting="precision", given=None, allowed=allowed)


class Packed(NamedTuple):
    """A packed file that fits its checkpoint."""

    path: Path
    layers: dict[int, StoredLayer]
    records: list[dict[str, Any]]
    """For every layer: `sha256` of its experts, and of a precision the `relative_error` of its weights."""
    start: int
    """Where the experts begin."""
    calibration: str | None
    """The same as in `Contents`."""


def bytes_in_precision(spec: ModelSpec) -> dict[int, int]:
    """An expert of every layer in the precision of `spec`, as a slot has it."""
    contents = contents_in_precision(spec.sites, spec.precision, spec.config.model_type, spec.dtype)
    return {layer: contents.expert_bytes(layer) for layer in contents.parts}


def experts_in_precision(place: Path, spec: ModelSpec) -> dict[int, StoredLayer]:
    """Where the experts of a checkpoint lie in the precision of `spec`. Raises `ConfigError` where it has not been
    packed so, and `CheckpointError` as `read_packed` does."""
    contents = contents_in_precision(spec.sites, spec.precision, spec.config.model_type, spec.own_dtype)
    packed = read_packed(place, contents)
    if packed is None:
        setting, without = ("precision", "auto") if spec.form == EXACT else ("low_precision", "none")
        raise UnpreparedError(
            f"`{setting}` {contents.name}: {contents.path(place)} is not there; run smoe pack on {place} with "
            f"`precision` {contents.name} first",
            setting=setting,
            given=contents.name,
            allowed=f"{without}, or a precision that the model has been packed in",
        )
    return packed.layers


def read_packed(place: Path, contents: Contents) -> Packed | None:
    """The packed file of a checkpoint with these contents, or None where there is none.

    Raises `CheckpointError` where it does not fit the checkpoint, or is cut short.
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
    """Raise `CheckpointError` where a pack is of another version, or of another checkpoint than the one next to it."""
    if header.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is a pack of version {header.get('version')!r:.20}, and this smoe reads version {VERSION}: run "
            "smoe pack again, or delete it"
        )
    if header != wanted:
        raise CheckpointError(
            f"{path} was packed from other weights: the names, sizes, headers or samples of the checkpoint's "
            f"files are not those that it was made of; run smoe pack again{_asked(wanted['contents'])}, or delete it"
        )


def _asked(contents: str) -> str:
    """What `smoe pack` is to be asked for to write such contents."""
    return f" with `precision` {contents}" if contents in PRECISION else ""


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
    """Whether a file begins as packed files do, or is empty as after a crash: only such a one may be overwritten."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) in (MAGIC, b"")


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
