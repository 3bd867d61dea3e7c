"""The families whose images smoe computes: where the image encoder is in transformers' model, and how its results enter
the language model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from smoe.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True)
class ImageFamily:
    """The image part of one family."""

    encoder: tuple[str, ...]
    """The paths of the modules that belong to the image part only."""
    has_axes: bool = False
    """Whether the tokens of an image have positions in three dimensions: time, height and width."""
    may_see_ahead: bool = False
    """Whether the tokens of an image can attend to later tokens of the same image."""
    token_field: str = "image_token_id"
    """The field of the configuration with the id of an image's tokens."""


IMAGE_FAMILIES = {
    "qwen3_vl_moe": ImageFamily(("model.visual",), has_axes=True),
    "qwen3_5_moe": ImageFamily(("model.visual",), has_axes=True),
    "glm4v_moe": ImageFamily(("model.visual",), has_axes=True),
    "gemma4": ImageFamily(("model.vision_tower", "model.embed_vision"), may_see_ahead=True),
    "llama4": ImageFamily(("vision_model", "multi_modal_projector")),
}
"""`model_type` -> the image part of the family."""


def image_family(config: Any) -> ImageFamily:
    """Return the image part of a model. Raise `UnsupportedModelError` if the model has none that smoe computes."""
    family = IMAGE_FAMILIES.get(config.model_type)
    if family is not None and getattr(config, "vision_config", None) is not None:
        return family
    why = (
        f"smoe computes images for the families {', '.join(sorted(IMAGE_FAMILIES))}"
        if family is None
        else "its config.json describes no image encoder (vision_config)"
    )
    raise UnsupportedModelError(
        f"`images` is true, and this model is of the family {config.model_type!r}: {why}; leave out `images`"
    )


def of_images(family: ImageFamily, names: Iterable[str]) -> frozenset[str]:
    """Return the names of the weights and buffers that belong to the image part."""
    begins = tuple(f"{path}." for path in family.encoder)
    return frozenset(name for name in names if name.startswith(begins))


def sees_ahead(family: ImageFamily, config: Any) -> bool:
    """Return whether the tokens of an image attend to later tokens of the same image."""
    return family.may_see_ahead and getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"


def check_libraries(model_type: str | None = None) -> None:
    """Raise `ConfigError` if a library that reads images is not installed. `model_type`: the model's family."""
    needed = {"PIL": "pillow"} | ({"torchvision": "torchvision"} if model_type == "llama4" else {})
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"`images` needs {' and '.join(missing)}, which this Python installation lacks; run: pip install "
            f"{' '.join(missing)}",
            setting="images",
            given=True,
            allowed=f"with {' and '.join(missing)}",
        )
