"""Prompts with images: the placeholders that the chat template has written become the tokens of the images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from smoe.errors import ImageError
from smoe.generation.prompt_images import PlacedImage, PromptImages
from smoe.models.image_encoder import ImageEncoder
from smoe.models.image_families import IMAGE_FAMILIES
from smoe.models.image_processor import ImageProcessor
from smoe.runtime.engine import Engine
from smoe.server.image_parts import bytes_of

MOST_IMAGES = 16
"""The largest number of images of a conversation."""


class Prompt(NamedTuple):
    """The tokens of a prompt, and its images."""

    ids: list[int]
    images: PromptImages | None = None


class ImagePrompts:
    """Reads the images of conversations for one model."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, folder: Path | None, most_bytes: int) -> None:
        """`folder`: the folder whose files requests may name; `most_bytes`: the largest size of such a file. Raises the
        errors of `ImageProcessor` and `ImageEncoder`."""
        engine: Engine = model.offload  # type: ignore[assignment]
        self._encoder = ImageEncoder(model)
        self._processor = ImageProcessor(Path(model.name_or_path), model.config, tokenizer, engine.config.image_tokens)
        self._folder, self._most_bytes, self._most_tokens = folder, most_bytes, engine.config.prefill_tokens

    def prompt(self, ids: Sequence[int], urls: Sequence[str], param: str) -> Prompt:
        """Return the prompt with its images. `ids`: the tokens with one placeholder for each image; `urls`: the images
        in order. Raises an `ApiError` or an `ImageError` for an image that cannot be read."""
        if len(urls) > MOST_IMAGES:
            raise ImageError(f"a conversation has {len(urls)} images; at most {MOST_IMAGES} are allowed")
        places = sum(token == self._processor.placeholder for token in ids)
        if places != len(urls):
            raise ImageError(
                f"the conversation has {len(urls)} images, and the model's chat template writes {places} placeholders "
                "of images; use a template for images, and no text of control tokens in messages"
            )
        whole: list[int] = []
        placed, following = [], iter(urls)
        for token in ids:
            if token != self._processor.placeholder:
                whole.append(token)
                continue
            read = self._processor.read(bytes_of(next(following), self._folder, self._most_bytes, param))
            begin = len(whole)
            whole += read.ids
            within = [begin + n for n, each in enumerate(read.ids) if each == self._encoder.token]
            self._check_length(len(within))
            placed.append(PlacedImage(read.inputs, read.digest, within))
        return Prompt(whole, PromptImages(whole, placed, self._encoder))

    def _check_length(self, tokens: int) -> None:
        """Raise `ImageError` if an image that cannot be divided has more tokens than one pass."""
        if self._encoder.sees_ahead and tokens > self._most_tokens:
            raise ImageError(
                f"an image takes {tokens} tokens, which this model computes in one pass, and one pass of this server "
                f"has at most {self._most_tokens} tokens (`prefill_tokens`)"
            )


def why_no_images(model_type: str) -> str:
    """Return why a server without an image encoder refuses images, as a sentence."""
    if model_type.removesuffix("_text") in IMAGE_FAMILIES:
        return "this server reads text only; to send images, start it with smoe serve --images"
    return "this model reads text only"
