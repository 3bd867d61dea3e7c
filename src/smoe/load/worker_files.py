"""Which of a model's files a worker needs: what it opens, and nothing of how text becomes tokens."""

from __future__ import annotations

from pathlib import Path

from smoe.memory.gguf_header import part_paths
from smoe.memory.safetensors_index import INDEX_FILE, shard_paths
from smoe.models.checkpoint import Checkpoint
from smoe.models.packed import contents_as_they_are, contents_in_precision
from smoe.models.spec import ModelSpec


def worker_files(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Path]:
    """The files by the names that they must have in one folder: weights, the pack of this precision (or of experts
    as they are) where there is one, the configuration last, as a folder without it is no model.

    All of a file goes, also what only main needs of it. Raises `CheckpointError` where weights are missing.
    """
    place = checkpoint.place
    if place.is_dir():
        found = {path.relative_to(place).as_posix(): path for path in shard_paths(place)}
    else:
        found = {path.name: path for path in part_paths(place)}
    if spec.precision == "auto":
        contents = contents_as_they_are(spec, checkpoint.experts(spec))
    else:
        contents = contents_in_precision(spec.sites, spec.precision, spec.config.model_type, spec.own_dtype)
    if contents is not None and contents.path(place).exists():
        found[contents.sidecar_name(place)] = contents.path(place)
    if place.is_dir():
        found |= {name: place / name for name in (INDEX_FILE, "config.json") if (place / name).exists()}
    return found
