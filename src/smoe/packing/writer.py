"""Writes a packed expert file layer by layer, and resumes after an interruption.

    experts.int4.smoe.partial         the header and the experts so far
    experts.int4.smoe.partial.json    the records of complete layers: checksums and quantization errors
    experts.int4.smoe.partial.lock    locked by the only process that may write

The record of a layer is written when its bytes are on disk. On resuming, layers with a record are compared with it, and
the following layers are written again. The file gets its final name when it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from filelock import FileLock, Timeout

from smoe.errors import CheckpointError, DiskSpaceError
from smoe.formats.registry import FORMATS
from smoe.memory.store import StoredLayer
from smoe.memory.tensor_bytes import assembled
from smoe.memory.torch_dtypes import TORCH
from smoe.models.files import check_disk
from smoe.models.outline import ExpertsSite
from smoe.models.packed import Contents, Packed, header_bytes, may_be_packed, record_bytes
from smoe.models.reference import reference_parameters, stored_numbers
from smoe.packing.calibration import Calibration
from smoe.packing.quantiser import quantised
from smoe.user_cache import PLACE
from smoe.whole_file import take_place, whole_file

_CHUNK = 1 << 22
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def pack(
    place: Path,
    contents: Contents,
    experts: Mapping[int, StoredLayer],
    progress: Callable[[int, int], None],
    calibration: Calibration | None = None,
) -> list[dict[str, Any]]:
    """Write the experts of a checkpoint (a folder or a GGUF file) into one file (`Contents.path`). Return the records
    of the file's layers.

    `progress(done, total)` counts experts; one expert at a time is in memory. With a `calibration`, which `contents`
    must name, experts are quantized for its inputs. After an interruption, the next call resumes from the `.partial`
    file. Raises the errors of `check_places` before it begins. Raises `DiskSpaceError` if the disk becomes full. Raises
    `CheckpointError` for an expert with NaN or infinity, and if another process writes the same file.
    """
    check_places(place, [contents])
    path, header = contents.path(place), header_bytes(contents.header(place))
    partial, notes = _unfinished(path)
    try:
        with _only_writer(partial):
            with partial.open("a+b") as file:
                records = _finished(file, notes, header, contents)
                each = _Experts(contents, experts, calibration)
                _write_layers(file, notes, len(header), each, records, progress)
                file.write(record_bytes(records))
                _settle(file)
            take_place(partial, path)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskSpaceError(
            f"the disk of {partial} is full ({error.strerror}); free some space and run the same command again: it "
            "continues after the last complete layer"
        ) from error
    notes.unlink(missing_ok=True)
    return records


def check_places(place: Path, wanted: Sequence[Contents]) -> None:
    """Raise the errors that would stop packing, before hours of work are done.

    `DiskSpaceError`: the disk is too small, even counting the bytes that interrupted runs have written.
    `CheckpointError`: a file with a required name exists but is no packed file, or no folder is writable.
    """
    needed = 0
    for contents in wanted:
        path = contents.path(place)
        partial, notes = _unfinished(path)
        for each in (path, partial, notes):
            if each.exists() and not each.is_file():
                raise CheckpointError(
                    f"smoe pack must write the file {each}, but something else than a file has that name; move it away"
                )
        if path.exists() and not may_be_packed(path):
            raise CheckpointError(
                f"smoe pack must write {path}, but that file exists and is no packed file; move it away"
            )
        written = partial.stat().st_size if partial.exists() else 0
        needed += max(0, len(header_bytes(contents.header(place))) + contents.experts * contents.stride - written)
    if wanted:
        folder = wanted[0].path(place).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"neither the folder of {place} nor {folder} can be written ({error.strerror}); set {PLACE} to a "
                "writable folder, or copy the model"
            ) from error
        check_disk(folder, needed, f"packing {place.name}")


def _unfinished(path: Path) -> tuple[Path, Path]:
    """Return the paths of an incomplete packed file and of the file with the records of its layers."""
    partial = path.with_name(f"{path.name}.partial")
    return partial, partial.with_name(f"{partial.name}.json")


def _write_layers(
    file: IO[bytes],
    notes: Path,
    start: int,
    experts: _Experts,
    records: list[dict[str, Any]],
    progress: Callable[[int, int], None],
) -> None:
    """Write the experts of all layers that have no record yet, and add the records of these layers to `records` and to
    the file `notes`. `start`: the size of the header in bytes."""
    contents = experts.contents
    done = sum(site.experts for site in contents.sites[: len(records)])
    file.truncate(start + done * contents.stride)
    file.seek(0, os.SEEK_END)
    for site in contents.sites[len(records) :]:
        digest, errors = hashlib.sha256(), [0.0, 0.0]
        for expert in range(site.experts):
            data = _expert(experts, site.layer, expert, errors)
            data += bytes(contents.stride - len(data))
            digest.update(data)
            file.write(data)
            done += 1
            progress(done, contents.experts)
        _settle(file)
        records.append(_record(site, digest.hexdigest(), errors, contents))
        with whole_file(notes) as written:
            written.write(json.dumps({"layers": records}).encode())


def _settle(file: IO[bytes]) -> None:
    """Write everything that is buffered for the file to disk, and return when the disk has stored it."""
    file.flush()
    os.fsync(file.fileno())


def damaged_layers(packed: Packed, contents: Contents, progress: Callable[[int, int], None]) -> list[int]:
    """Return the layers of a packed file whose bytes do not match their checksums. `progress(done, total)` counts
    bytes."""
    found, total = [], contents.experts * contents.stride
    done = 0
    progress(done, total)
    with packed.path.open("rb") as file:
        file.seek(packed.start)
        for site, record in zip(contents.sites, packed.records, strict=True):
            nbytes = site.experts * contents.stride
            if _digest(file, nbytes) != record["sha256"]:
                found.append(site.layer)
            done += nbytes
            progress(done, total)
    return found


@contextmanager
def _only_writer(partial: Path) -> Iterator[None]:
    """Lock an incomplete packed file during the `with` block. Raise `CheckpointError` if another process has locked
    it."""
    place = partial.with_name(f"{partial.name}.lock")
    lock = FileLock(place, blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise CheckpointError(f"another process is writing {partial}; wait for it to end, or end it") from error
    try:
        yield
    finally:
        lock.release()
        with suppress(OSError):  # another process may have opened it meanwhile
            place.unlink(missing_ok=True)


def _finished(file: IO[bytes], notes: Path, header: bytes, contents: Contents) -> list[dict[str, Any]]:
    """Return the records of layers that an interrupted run completed. If the header differs or there are no records,
    start the file again."""
    records: list[dict[str, Any]] = []
    file.seek(0)
    if file.read(len(header)) == header and notes.exists():
        try:
            noted = json.loads(notes.read_bytes())["layers"]
        except (ValueError, KeyError, TypeError):
            noted = []
        for site, record in zip(contents.sites, noted, strict=False):
            if _digest(file, site.experts * contents.stride) != record["sha256"]:
                break
            records.append(record)
        return records
    file.truncate(0)
    file.write(header)
    return records


def _digest(file: IO[bytes], nbytes: int) -> str:
    digest, done = hashlib.sha256(), 0
    while done < nbytes and (data := file.read(min(_CHUNK, nbytes - done))):
        digest.update(data)
        done += len(data)
    return digest.hexdigest()


def _record(site: ExpertsSite, digest: str, errors: list[float], contents: Contents) -> dict[str, Any]:
    error, norm = errors
    is_lossy = not contents.is_as_stored and any(each.is_quantised for each in contents.parts[site.layer])
    relative = {"relative_error": (error / norm) ** 0.5 if norm else 0.0} if is_lossy else {}
    return {"layer": site.layer, "sha256": digest, **relative}


class _Experts(NamedTuple):
    """The description of the packed file, and the stored tensors from which its experts are made."""

    contents: Contents
    sources: Mapping[int, StoredLayer]
    calibration: Calibration | None


def _expert(experts: _Experts, layer: int, expert: int, errors: list[float]) -> bytes:
    """Return the bytes of an expert for the packed file. Add the squared error and the squared norm of its weights to
    the two entries of `errors`."""
    contents, calibration = experts.contents, experts.calibration
    if contents.is_as_stored:
        return _expert_as_stored(experts, layer, expert)
    parameters = reference_parameters(experts.sources[layer], [expert], TORCH[contents.dtype])
    for name, weights in parameters.items():
        if not bool(torch.isfinite(weights).all()):
            raise CheckpointError(f"{_where(name, layer, expert)} holds NaN or infinity; download the checkpoint again")
    compensations = {} if calibration is None else calibration.compensations(layer, expert, parameters)
    data = []
    for each in contents.parts[layer]:
        weights, where = parameters[each.part.name][0], _where(each.part.name, layer, expert)
        if each.is_quantised:
            weights = weights.t().contiguous() if each.part.is_turned else weights
            try:
                stored, error = quantised(weights, FORMATS[each.kind], compensations.get(each.part.name))
            except OverflowError as problem:
                raise CheckpointError(f"{where}: {problem}; it cannot be packed in {contents.name}") from problem
            errors[0] += error
            errors[1] += float(weights.double().square().sum())
        else:
            stored = weights.contiguous().view(torch.uint8)
        data.append(stored.numpy().tobytes())
    return b"".join(data)


def _expert_as_stored(experts: _Experts, layer: int, expert: int) -> bytes:
    """Return the bytes of an expert in the layout of a slot, with unchanged codes and scales."""
    data, sources = [], experts.sources[layer].sources[expert]
    for each in experts.contents.parts[layer]:
        pieces = sources[each.part.name]
        if each.is_quantised:
            stored = torch.cat([assembled(piece) for piece in pieces])
            is_finite = FORMATS[each.kind].is_finite(stored.numpy().reshape(-1))
        else:
            numbers = torch.cat([stored_numbers(piece) for piece in pieces]).to(TORCH[each.kind])
            stored, is_finite = numbers.view(torch.uint8), bool(torch.isfinite(numbers).all())
        if not is_finite:
            raise CheckpointError(
                f"{_where(each.part.name, layer, expert)} holds NaN or infinity; download the checkpoint again"
            )
        data.append(stored.numpy().tobytes())
    return b"".join(data)


def _where(part: str, layer: int, expert: int) -> str:
    return f"{part} of expert {expert} in layer {layer}"
