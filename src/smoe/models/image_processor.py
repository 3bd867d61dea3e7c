"""Converts image files to the tensors that an image encoder takes, with the checkpoint's image processor of
transformers, and to the tokens that take the image's place in a prompt."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoImageProcessor

from smoe.errors import ImageError, UnsupportedModelError
from smoe.models.files import naming, reason_of
from smoe.models.image_families import check_libraries

MOST_PIXELS = 2**25
"""The largest number of pixels of an image. Decoded, it takes 96 MiB, whatever the size of its file is."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_OF_ENCODER = ("pixel_values", "image_grid_thw", "image_position_ids")
"""The results of image processors that the encoders take."""
_SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Gemma 4's possible limits of the number of an image's tokens."""


class ReadImage(NamedTuple):
    """An image as tensors and tokens."""

    inputs: Mapping[str, torch.Tensor]
    """The tensors that the image encoder takes."""
    digest: bytes
    """A hash of the file."""
    ids: list[int]
    """The tokens that take the place of the image's placeholder in a prompt."""


class ImageProcessor:
    """The image processor of one checkpoint."""

    def __init__(self, folder: Path, config: Any, tokenizer: Any, most_tokens: int) -> None:
        """`config`: the model's configuration; `most_tokens`: the largest number of tokens of an image. Raises
        `ConfigError` if a library is missing, and `ModelError` for a checkpoint without a usable image processor."""
        check_libraries(config.model_type)
        self._config, self._tokenizer, self._most_tokens = config, tokenizer, most_tokens
        with naming(f"{folder} has no usable image processor (preprocessor_config.json)"):
            self._library = AutoImageProcessor.from_pretrained(
                folder,
                backend="torchvision" if config.model_type == "llama4" else "pil",
                trust_remote_code=False,
                local_files_only=True,
            )
        self.placeholder = self._token("<|image|>") if config.model_type == "llama4" else int(config.image_token_id)
        """The token that the chat template writes for an image."""

    def read(self, data: bytes) -> ReadImage:
        """Return an image file as tensors and tokens. Raise `ImageError` if it is not an image that can be read."""
        image = _opened(data)
        try:
            found = self._library.preprocess([image], return_tensors="pt", **self._sizes())
        except Exception as error:
            raise ImageError(f"the model's image processor refuses an image: {reason_of(error)}") from error
        inputs = {name: found[name] for name in _OF_ENCODER if name in found}
        return ReadImage(inputs, hashlib.sha256(data).digest()[:16], self._ids(found))

    def _sizes(self) -> dict[str, Any]:
        """Return the arguments of transformers' processor that limit the number of an image's tokens."""
        library = self._library
        if self._config.model_type == "llama4":
            return {"max_patches": max(1, self._most_tokens // self._tile_tokens() - 1)}
        if self._config.model_type == "gemma4":
            most = max((count for count in _SOFT_TOKENS if count <= self._most_tokens), default=_SOFT_TOKENS[0])
            return {"max_soft_tokens": min(library.max_soft_tokens, most)}
        pixels = self._most_tokens * (library.patch_size * library.merge_size) ** 2
        if self._config.model_type == "glm4v_moe":  # it counts the pixels of an image once for each time step
            pixels *= library.temporal_patch_size
        edges = {name: min(int(library.size[name]), pixels) for name in ("shortest_edge", "longest_edge")}
        return {"size": edges}

    def _ids(self, found: Any) -> list[int]:
        """Return the tokens of an image. `found`: what transformers' image processor has made of it."""
        config = self._config
        if config.model_type == "llama4":
            return self._tiles(*(int(count) for count in found["aspect_ratios"][0]))
        if config.model_type == "gemma4":
            tokens = int(found["num_soft_tokens_per_image"][0])
            return [config.boi_token_id, *([config.image_token_id] * tokens), config.eoi_token_id]
        tokens = int(found["image_grid_thw"][0].prod()) // self._library.merge_size**2
        return [self.placeholder] * tokens

    def _tiles(self, rows: int, columns: int) -> list[int]:
        """Return Llama 4's tokens of an image: its tiles, if there are several, and the whole image."""
        tile = [int(self._config.image_token_id)] * self._tile_tokens()
        ids = [self._token("<|image_start|>")]
        for _ in range(rows if rows * columns > 1 else 0):
            for column in range(columns):
                ids += [self._token("<|tile_x_separator|>")] * bool(column) + tile
            ids.append(self._token("<|tile_y_separator|>"))
        return [*ids, self.placeholder, *tile, self._token("<|image_end|>")]

    def _tile_tokens(self) -> int:
        vision = self._config.vision_config
        return int((vision.image_size // vision.patch_size) ** 2 * vision.pixel_shuffle_ratio**2)

    def _token(self, text: str) -> int:
        token = self._tokenizer.convert_tokens_to_ids(text)
        if token is None or token == self._tokenizer.unk_token_id:
            raise UnsupportedModelError(f"the tokenizer has no token {text!r}, which prompts with images need")
        return int(token)


def _opened(data: bytes) -> Any:
    """Return an image file as an image in RGB, turned as its metadata say. Raise `ImageError` if it is none, or has too
    many pixels."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            width, height = image.size
            if width * height <= MOST_PIXELS:
                return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # decoders of damaged files raise errors of many kinds
        raise ImageError(
            f"an image cannot be read as {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]} ({type(error).__name__})"
        ) from error
    raise ImageError(f"an image has {width} x {height} pixels, and at most {MOST_PIXELS} are allowed; make it smaller")
