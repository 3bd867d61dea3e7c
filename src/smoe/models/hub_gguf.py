"""Selects and downloads GGUF files of a hub repository. A user names them as:

    OWNER/REPO:Q4_K_M                 the only model with that quantization, all of its parts
    OWNER/REPO/folder/file.gguf       that file, or the split model to which it belongs

The description of a model is at the beginning of its files. If they are not in the cache, only that beginning is
downloaded, to temporary sparse files of full size.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from smoe.errors import CheckpointError, ModelError
from smoe.memory.gguf_header import read_gguf_header
from smoe.models import hub
from smoe.models.gguf_names import labels_of, models_of, parts_of

_FIRST_BYTES = 2**24
"""How many bytes of a file are downloaded first: enough for a header with a vocabulary of 200,000 tokens."""
_MOST_NAMES = 12
_LABEL = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


class HubGguf(NamedTuple):
    """A GGUF model of the hub, as a user has named it."""

    repository: str
    wanted: str
    """A quantization, or the path of a file."""


def named_gguf(model: str) -> HubGguf | None:
    """Return the repository and the selected quantization or file if `model` names a GGUF model of the hub, else
    None."""
    repository, _, label = model.rpartition(":")
    if hub.is_id(repository) and _LABEL.fullmatch(label):
        return HubGguf(repository, label)
    owner, _, rest = model.partition("/")
    name, _, path = rest.partition("/")
    if hub.is_id(f"{owner}/{name}") and path.lower().endswith(".gguf") and ".." not in PurePosixPath(path).parts:
        return HubGguf(f"{owner}/{name}", path)
    return None


def cached_gguf(named: HubGguf, revision: str | None) -> Path | None:
    """Return the first file of a GGUF model if all files of the model are in the cache, otherwise None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(named.repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix.lower() == ".gguf"}
    models = models_of(named.wanted, names)
    if len(models) != 1:
        return None
    parts = parts_of(models[0])
    return folder / parts[0] if names.issuperset(parts) else None


def described_gguf(named: HubGguf, revision: str | None) -> Path:
    """Return the first file of a model in the cache, or a temporary file that contains only its header."""
    known = cached_gguf(named, revision)
    if known is not None:
        return known
    with hub.asking(named.repository):
        sizes = hub.files_of(named.repository, revision)
        parts = _chosen(named, sizes)
        folder = Path(tempfile.mkdtemp(dir=_headers().name))
        paths = [_fetch_header(named.repository, name, revision, sizes[name], folder) for name in parts]
    return paths[0]


def model_bytes(named: HubGguf, revision: str | None) -> int:
    """Return the size in bytes of all files of a GGUF model in the repository."""
    with hub.asking(named.repository):
        sizes = hub.files_of(named.repository, revision)
        return sum(sizes[name] for name in _chosen(named, sizes))


def download_gguf(named: HubGguf, revision: str | None) -> Path:
    """Download all files of a GGUF model into the cache, and return the path of the first one."""
    from huggingface_hub import hf_hub_download

    with hub.asking(named.repository):
        parts = _chosen(named, hub.files_of(named.repository, revision))
        paths = [Path(hf_hub_download(named.repository, name, revision=revision)) for name in parts]
    return paths[0]


def _chosen(named: HubGguf, sizes: Mapping[str, int]) -> list[str]:
    """Return the names of the files of the selected model in order. Raise an error unless exactly one complete model
    matches the selection."""
    models = models_of(named.wanted, sizes)
    if len(models) != 1:
        there = models or labels_of(sizes)
        listed = ", ".join(there[:_MOST_NAMES]) + (", ..." if there[_MOST_NAMES:] else "") or "no GGUF file"
        many = f"{len(models)} GGUF models" if models else "no GGUF model"
        give = f"{named.repository}/{models[0]}" if models else f"{named.repository}:QUANTISATION"
        raise hub.no_model(
            named.repository,
            f"{named.repository} has {many} of {named.wanted!r}; there is {listed}: give one, as {give}",
        )
    parts = parts_of(models[0])
    absent = [name for name in parts if name not in sizes]
    if absent:
        raise CheckpointError(
            f"{named.repository} lacks {len(absent)} of {len(parts)} parts of the model, beginning with "
            f"{absent[0]!r}; choose another file or repository"
        )
    return parts


@cache
def _headers() -> tempfile.TemporaryDirectory[str]:
    """Return the folder for this process's downloaded headers; it is deleted at exit."""
    return tempfile.TemporaryDirectory(prefix="smoe-gguf-headers-")


def _fetch_header(repository: str, name: str, revision: str | None, size: int, folder: Path) -> Path:
    """Download the header of a file into a sparse file of full size; raises `CheckpointError` if there is no header."""
    from huggingface_hub import HfFileSystem

    path, count = folder / PurePosixPath(name).name, 0
    with HfFileSystem().open(f"{repository}/{name}", "rb", revision=revision) as remote, path.open("wb") as file:
        while True:
            more = remote.read(max(_FIRST_BYTES, count))
            file.write(more)
            file.truncate(size)  # flushes, and extends the file without writing
            count += len(more)
            try:
                if read_gguf_header(path).data_offset <= count:
                    return path
            except CheckpointError:
                if not more or count >= size:
                    raise
            if not more:
                raise ModelError(
                    f"the download of {repository}/{name} ended after {count} bytes, and the file has {size} bytes; "
                    "try again"
                )
