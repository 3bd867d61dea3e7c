"""Reads a model's `LibrarySpec` from its configuration, by building transformers' model without weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from smoe.config import EngineConfig
from smoe.errors import UnsupportedModelError
from smoe.memory.gguf_header import is_gguf
from smoe.models.checkpoint import Checkpoint, described_checkpoint
from smoe.models.dense import quiet_library, separate
from smoe.models.examine import examine, outline_of
from smoe.models.experts import find_sites, meta_model
from smoe.models.files import naming
from smoe.models.finish_spec import choose_context, choose_dtype, finished
from smoe.models.image_families import image_family, of_images
from smoe.models.released_schemes import TAKE
from smoe.models.spec import LibrarySpec, own_dtype


def read_spec(model: str | Path, config: EngineConfig, revision: str | None = None) -> LibrarySpec:
    """Return the spec of a model. Only its configuration is read, and transformers' model is built without weights."""
    checkpoint = described_checkpoint(model, revision)
    path, model_config = checkpoint.config_place, checkpoint.config()
    _refuse_quantised(model_config, path)
    if config.images:
        _check_images(checkpoint, model_config)
    with naming(f"{path} describes no model that can be built"):
        context_tokens = choose_context(model_config, config)
        own, dtype = own_dtype(model_config), choose_dtype(model_config, config)
        shell = meta_model(model_config, dtype.torch, config.images)
    separate(shell, checkpoint.stored_apart(shell, dtype.torch))
    sites = find_sites(shell)
    unclear = f"the structure of {model_config.model_type!r} ({path}) could not be analysed, so it is refused"
    with naming(unclear, UnsupportedModelError), quiet_library():
        anatomy = examine(shell, sites, dtype.torch)
    outline = outline_of(shell, sites, anatomy, dtype.torch)
    if config.images:
        names = of_images(image_family(model_config), [*outline.weights, *outline.buffers])
        outline = replace(outline, of_images=names)
    spec = LibrarySpec(
        config=model_config,
        outline=outline,
        dtype=dtype,
        own_dtype=own,
        context_tokens=context_tokens,
        precision=config.precision,
        shell=shell,
        with_images=config.images,
    )
    return finished(spec, checkpoint, config)


def spec_of_whole(checkpoint: Checkpoint, spec: LibrarySpec, config: EngineConfig) -> LibrarySpec:
    """Return the spec for a checkpoint whose weights are on disk. The spec is read again if necessary.

    `spec` may have been made from headers alone. Then its locations of quantized weights are invalid, and only the
    files show whether tied weights are stored separately.
    """
    return read_spec(checkpoint.place, config) if spec.dense or spec.shell.all_tied_weights_keys else spec


def _check_images(checkpoint: Checkpoint, model_config: PretrainedConfig) -> None:
    """Raise `UnsupportedModelError` if images were requested of a model without an image encoder that smoe computes."""
    if is_gguf(checkpoint.place) and not checkpoint.place.is_dir():
        raise UnsupportedModelError(
            f"`images` is true, and {checkpoint.place.name} is a GGUF file, which contains no image encoder that smoe "
            "reads; use the model's folder of safetensors, or leave out `images`"
        )
    image_family(model_config)


def _refuse_quantised(model_config: PretrainedConfig, path: Path) -> None:
    both = (model_config, model_config.get_text_config())
    found = (getattr(each, "quantization_config", None) for each in both)
    quantisation = next((each for each in found if each is not None), None)
    if quantisation is not None:
        method = (
            quantisation.get("quant_method", "?") if isinstance(quantisation, dict) else type(quantisation).__name__
        )
        raise UnsupportedModelError(
            f"{path}: the checkpoint is quantised ({method!s:.80}), {model_config.model_type!r}, which smoe does not "
            f"read; {TAKE}"
        )
