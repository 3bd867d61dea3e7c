"""Reads a model's spec without transformers, if it can be computed by arithmetic on its configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from smoe.config import EngineConfig
from smoe.memory.checkpoint_json import read_object
from smoe.models.described import Described, described_at
from smoe.models.family_outline import outline_by_family, plain_config
from smoe.models.files import described_place
from smoe.models.finish_spec import choose_context, choose_dtype, finished
from smoe.models.library_names import refuse_unknown_family
from smoe.models.plain_config import UndescribedError
from smoe.models.spec import ModelSpec, own_dtype


def model_sizes(model: str | Path, config: EngineConfig, revision: str | None = None) -> tuple[Described, ModelSpec]:
    """Return (the description of a model's files, its spec).

    If arithmetic is not sufficient, transformers' model is built without weights, which takes seconds and hundreds of
    MiB. Raise `UnsupportedModelError` for a model that smoe cannot run.
    """
    return sizes_at(described_place(model, revision), config)


def sizes_at(place: Path, config: EngineConfig) -> tuple[Described, ModelSpec]:
    """Return what `model_sizes` returns, for the model in a folder or GGUF file."""
    try:
        described, spec = by_arithmetic(place, config)
        if described.has_weights():
            described.experts(replace(spec, precision="auto"))  # this checks the non-expert weights too
        return described, spec
    except UndescribedError:
        if place.is_dir():
            path = place / "config.json"
            refuse_unknown_family(path, read_object(path))
        from smoe.models.checkpoint import checkpoint_at
        from smoe.models.read_spec import read_spec

        return checkpoint_at(place), read_spec(place, config)


def by_arithmetic(place: Path, config: EngineConfig) -> tuple[Described, ModelSpec]:
    """Return the description and the spec, computed by arithmetic alone. The files are not compared with the spec.

    Raise `UndescribedError` for models that only transformers can describe.
    """
    if config.images:
        raise UndescribedError("an image encoder")
    described = described_at(place)
    model_config = plain_config(*described.fields())
    dtype = choose_dtype(model_config, config)
    spec = ModelSpec(
        config=model_config,
        outline=outline_by_family(model_config, dtype),
        dtype=dtype,
        own_dtype=own_dtype(model_config),
        context_tokens=choose_context(model_config, config),
        precision=config.precision,
    )
    return described, finished(spec, described, config)
