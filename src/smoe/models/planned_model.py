"""Reads the sizes of a model for `smoe plan`: exact ones if smoe can run the model, otherwise rough ones."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from smoe.config import EngineConfig
from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.memory.dtypes import Dtype
from smoe.memory.gguf_header import is_gguf
from smoe.models.described import Described
from smoe.models.files import described_place
from smoe.models.finish_spec import choose_context, choose_dtype, finished
from smoe.models.model_sizes import sizes_at
from smoe.models.outline import Outline
from smoe.models.plain_config import PlainConfig
from smoe.models.spec import ModelSpec, own_dtype
from smoe.models.usual_fields import LackingSizesError


class PlannedModel(NamedTuple):
    """A model for which a plan is made."""

    described: Described
    spec: ModelSpec
    obstacle: str | None = None
    """Why smoe cannot run the model; None if it can. The sizes of a model that smoe cannot run are rough."""


class RoughlyDescribed(Described, Protocol):
    """The description of a model that smoe cannot run.

    Its methods raise `LackingSizesError` if the files lack a size without which nothing can be estimated.
    """

    def model_config(self) -> PlainConfig:
        """Return the sizes of the model, by transformers' names of fields."""

    def outline(self, dtype: Dtype) -> Outline:
        """Return the outline of the model. `dtype`: that of the KV cache."""


def planned_model(model: str | Path, config: EngineConfig, revision: str | None = None) -> PlannedModel:
    """Return the sizes of a model for a plan. Rough sizes need neither torch nor transformers.

    Raise `NotMoEError` for a dense model, and `UnsupportedModelError` for a model that smoe cannot run and whose files
    lack a size or have sizes that contradict each other.
    """
    place = described_place(model, revision)
    try:
        return PlannedModel(*sizes_at(place, config))
    except UnsupportedModelError as error:
        if config.images:
            raise
        try:
            return _roughly(place, config, str(error).rstrip("."))
        except (LackingSizesError, CheckpointError) as lacking:
            reason = str(error).rstrip(".")
            raise UnsupportedModelError(f"{reason}. smoe cannot estimate its speed either: {lacking}") from error


def _roughly(place: Path, config: EngineConfig, obstacle: str) -> PlannedModel:
    described = _rough_description(place)
    model_config = described.model_config()
    dtype = choose_dtype(model_config, config)
    spec = ModelSpec(
        config=model_config,
        outline=described.outline(dtype),
        dtype=dtype,
        own_dtype=own_dtype(model_config),
        context_tokens=choose_context(model_config, config),
        precision=config.precision,
    )
    return PlannedModel(described, finished(spec, described, config), obstacle)


def _rough_description(place: Path) -> RoughlyDescribed:
    """Return the rough description of a model; only the reader of its format is imported."""
    if is_gguf(place) and not place.is_dir():
        from smoe.models.rough_gguf import RoughGguf

        return RoughGguf(place)
    from smoe.models.rough_folder import RoughFolder

    return RoughFolder(place)
