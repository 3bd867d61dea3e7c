"""Compares packs with their checksums, once per machine, when they are first loaded.

Verified files are recorded in the user's cache by size, inode number and time of modification. A file that has been
written or copied since then is compared again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from smoe.errors import CheckpointError
from smoe.memory.store import StoredLayer
from smoe.models.checkpoint import Checkpoint
from smoe.models.load_observer import OnBytes
from smoe.models.packed import Contents, Packed, contents_as_they_are, contents_in_precision
from smoe.models.spec import ModelSpec
from smoe.packing.writer import damaged_layers
from smoe.user_cache import StoredValue

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Verified(StoredValue):
    """The record of a packed file whose checksums were right."""

    kind = "verified-packs"

    pack: str
    identity: list[int]


def verify_pack(checkpoint: Checkpoint, spec: ModelSpec, experts: Mapping[int, StoredLayer], on_bytes: OnBytes) -> None:
    """Compare the packed file from which a model's experts are read with its checksums, unless there is no packed file
    or this machine has done so before.

    Raises `CheckpointError` for a damaged file, with the damaged layers.
    """
    contents = _contents(spec, experts)
    path = None if contents is None else contents.path(checkpoint.place)
    if contents is None or path is None or not path.exists():
        return
    known = _Verified.stored(path)
    if known is not None and known.identity == _identity(path):
        return
    packed, before = checkpoint.packed(contents), _identity(path)
    if packed is None:
        return
    damaged = damaged_layers(packed, contents, on_bytes)
    if damaged:
        raise CheckpointError(_complaint(packed, contents, damaged))
    try:
        _Verified(str(path), before).store(path)
    except OSError as error:
        _log.warning(
            "%s is undamaged, but the result of this check cannot be stored (%s), so the next load checks the file "
            "again",
            path,
            error,
        )


def _contents(spec: ModelSpec, experts: Mapping[int, StoredLayer]) -> Contents | None:
    if spec.precision == "auto":
        return contents_as_they_are(spec, experts)
    return contents_in_precision(spec.sites, spec.precision, spec.config.model_type, spec.own_dtype)


def _complaint(packed: Packed, contents: Contents, damaged: list[int]) -> str:
    asked = "" if contents.is_as_stored or contents.name.isupper() else f" with `precision={contents.name}`"
    layers = f"layer{'s' * (len(damaged) > 1)} {', '.join(map(str, damaged[:8]))}{', ...' * (len(damaged) > 8)}"
    return (
        f"{packed.path} is damaged in {layers}: its bytes differ from those that smoe pack wrote; delete it and run "
        f"smoe pack again{asked}, or copy it again"
    )


def _identity(path: Path) -> list[int]:
    """Return the numbers that identify a file and its state: they change when the file is written or replaced."""
    found = path.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns]
