"""The images of one prompt: where they are, and what a pass over a piece of the prompt gets of them.

    ids         text text  IMG   IMG   IMG  text        the same for any image of this size
    keys        text text -h-1  -h-1  -h-1  text        h: a hash of the image
    positions     0    1    2     2     2     4         of families in which a token has several positions, the first

Stored keys and values are found by `keys`, so that they are reused only with the same image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from smoe.models.image_encoder import Features, ImageEncoder


class PlacedImage(NamedTuple):
    """One image of a prompt."""

    inputs: Mapping[str, torch.Tensor]
    """The tensors that transformers' image processor makes of the image."""
    digest: bytes
    """A hash of the image."""
    places: Sequence[int]
    """The indices, ascending, of the prompt's tokens whose embeddings the image's features replace."""


class PromptImages:
    """The images of one prompt, and the positions of the prompt's tokens."""

    def __init__(self, ids: Sequence[int], images: Sequence[PlacedImage], encoder: ImageEncoder) -> None:
        """`ids`: the tokens of the prompt; `images`: its images in order, at least one."""
        self.ids = list(ids)
        self.keys = list(ids)
        """The tokens of the prompt. In place of an image's tokens there is a negative number that is derived from the
        image's hash."""
        for image in images:
            key = -1 - int.from_bytes(image.digest, "big")
            for place in image.places:
                self.keys[place] = key
        self._images, self._encoder = list(images), encoder
        self._positions = encoder.positions(ids, [image.inputs for image in images])
        self.shift = 0 if self._positions is None else int(self._positions.max()) + 1 - len(self.ids)
        """The number that is added to the index of a token after the prompt to get the token's position."""
        self._features: dict[int, Features] = {}

    def keys_of(self, ids: Sequence[int], begin: int) -> list[int]:
        """Return a piece of a text that begins with this prompt as in `keys`. `ids`: the piece's tokens, the first of
        which has the index `begin`."""
        keys = self.keys[begin : begin + len(ids)]
        return [*keys, *ids[len(keys) :]]

    def ids_of(self, keys: Sequence[int]) -> list[int]:
        """Return the token ids of a text that begins with this prompt. `keys`: the text as in `keys`."""
        return [*self.ids[: len(keys)], *keys[len(self.ids) :]]

    def reusable(self, tokens: int) -> int:
        """Return how many of the prompt's first `tokens` tokens can be reused. If the tokens of an image depend on
        later ones, an image is reused whole or not at all."""
        cut = self._cut_by(tokens)
        return tokens if cut is None else cut.places[0]

    def piece_end(self, begin: int, end: int) -> int:
        """Return where a piece of the text that begins at `begin` ends, given that it should end at `end`. If the
        tokens of an image depend on later ones, an image is never divided."""
        cut = self._cut_by(end)
        if cut is None:
            return end
        return cut.places[0] if cut.places[0] > begin else cut.places[-1] + 1

    def _cut_by(self, place: int) -> PlacedImage | None:
        """Return the image that a division of the prompt before the index `place` would divide although it must not be
        divided; None if there is none."""
        if not self._encoder.sees_ahead:
            return None
        return next((each for each in self._images if each.places[0] < place <= each.places[-1]), None)

    def encode(self, begin: int, end: int, passing: Callable[[], AbstractContextManager[None]]) -> None:
        """Compute the features of the images that have tokens in a piece of the prompt, unless they are computed
        already, each within a context of `passing`. Free the features of images that end before the piece."""
        for number, image in enumerate(self._images):
            if image.places[-1] < begin:
                self._features.pop(number, None)
            elif image.places[0] < end and number not in self._features:
                with passing():
                    self._features[number] = self._encoder.encode(image.inputs)

    def arguments(self, ids: Sequence[int], begin: int) -> dict[str, Any]:
        """Return the arguments of the model's forward function for a piece of the text. `ids`: the piece's tokens, the
        first of which has the index `begin`. `encode` must have been called for it."""
        end = begin + len(ids)
        parts = []
        for number, image in enumerate(self._images):
            within = [n for n, place in enumerate(image.places) if begin <= place < end]
            if within:
                parts.append(self._features[number].part(within[0], within[-1] + 1))
        given = self._encoder.arguments([*self.ids[:begin], *ids], parts) if parts else {}
        return given | {"position_ids": self._positions_of(begin, end)}

    def _positions_of(self, begin: int, end: int) -> torch.Tensor:
        """Return the positions of the text's tokens `begin` to `end` - 1: [1, tokens], or [4, 1, tokens] if a token has
        several: its index, and its place in time, height and width."""
        index = torch.arange(begin, end)
        if self._positions is None:
            return index[None]
        first = max(begin, len(self.ids))
        after = (torch.arange(first, max(first, end)) + self.shift).expand(3, -1)
        of_axes = torch.cat([self._positions[:, begin:end], after], dim=1)
        return torch.cat([index[None], of_axes])[:, None]


def piece_end(images: PromptImages | None, begin: int, end: int) -> int:
    """Return where a piece of a text ends that begins at `begin` and should end at `end`. `images`: those of the text's
    prompt."""
    return end if images is None else images.piece_end(begin, end)
