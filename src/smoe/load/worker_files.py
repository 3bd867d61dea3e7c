"""Selects the files of a model that a worker needs. Tokenizer files are not among them."""

from __future__ import annotations

from pathlib import Path

from smoe.memory.gguf_header import part_paths
from smoe.memory.safetensors_index import INDEX_FILE, shard_paths
from smoe.models.checkpoint import Checkpoint
from smoe.models.packed import contents_as_they_are, contents_in_precision
from smoe.models.spec import ModelSpec


def worker_files(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Path]:
    """Return the paths of the files of a model that a worker needs, by their names in the worker's folder.

    The files are the weights, the packed file of this precision (or of experts as stored) if there is one, and at the
    end the configuration, because a folder without it is not a model. Every file is complete, so it includes data that
    only the coordinator needs. Raises `CheckpointError` if weights are missing.
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
