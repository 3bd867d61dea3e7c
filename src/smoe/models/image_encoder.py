"""Computes the features of images with the model's image encoder, and passes them to the language model.

    pixels --encoder--> features [n, H], one row for each of the image's n tokens --model's forward--> hidden states

transformers' forward function of the whole model puts the features in place of the tokens' embeddings. It can also
compute them, but then for all images of a prompt at once. Here each image is computed once, and a prompt that is read
in pieces gets the rows of each piece.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.errors import UnsupportedModelError
from smoe.models.image_families import image_family, sees_ahead
from smoe.models.wide_linears import is_bf16_slow, widen

_GRID = "image_grid_thw"
"""The name of the tensor [1, 3] with an image's numbers of patches in time, height and width."""


class Features(NamedTuple):
    """The features of one image, or of some of its tokens."""

    rows: torch.Tensor
    """[n, H]: what takes the place of the embeddings of the image's n tokens."""
    deeper: tuple[torch.Tensor, ...] = ()
    """[n, H] each: what is added to the hidden states after the first layers; only in some families."""

    def part(self, begin: int, end: int) -> Features:
        """Return the features of the image's tokens `begin` to `end` - 1."""
        return Features(self.rows[begin:end], tuple(each[begin:end] for each in self.deeper))


class ImageEncoder:
    """The image encoder of one loaded model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raise `UnsupportedModelError` if the installed transformers does not take computed features."""
        self._family = image_family(model.config)
        self._model = model
        self.token = int(getattr(model.config, self._family.token_field))
        """The id of the tokens whose embeddings the features replace."""
        self.sees_ahead = sees_ahead(self._family, model.config)
        """Whether the tokens of an image attend to later tokens of the same image."""
        if "mm_encoder_outputs" not in inspect.signature(type(model).forward).parameters:
            raise UnsupportedModelError(
                "`images` needs a version of transformers whose models take the results of an image encoder "
                "(`mm_encoder_outputs`); upgrade transformers to 5.20 or later, or leave out `images`"
            )
        if is_bf16_slow():
            for path in self._family.encoder:
                widen(model.get_submodule(path))

    def encode(self, inputs: Mapping[str, torch.Tensor]) -> Features:
        """Return the features of one image. `inputs`: the tensors that transformers' image processor makes of it."""
        device = self._model.device
        given = {name: tensor.to(device) for name, tensor in inputs.items()}
        found = self._model.get_image_features(**given, return_dict=True)  # type: ignore[operator]
        pooled = getattr(found, "pooler_output", None)
        if isinstance(pooled, (tuple, list)):
            deeper = tuple(torch.cat(tuple(each)) for each in getattr(found, "deepstack_features", None) or ())
            return Features(torch.cat(tuple(pooled)), deeper)
        return Features(found.last_hidden_state.flatten(0, -2))  # the model's forward applies the projector

    def arguments(self, ids: Sequence[int], parts: Sequence[Features]) -> dict[str, Any]:
        """Return the arguments of the model's forward function for a piece of a prompt that has tokens of images.
        `ids`: the prompt up to the end of the piece; `parts`: the features of the piece's image tokens, in order."""
        rows = torch.cat([part.rows for part in parts])
        deeper = [torch.cat(each) for each in zip(*(part.deeper for part in parts), strict=True)]
        outputs = SimpleNamespace(
            pooler_output=(rows,), last_hidden_state=rows, deepstack_features=[(each,) for each in deeper]
        )
        given: dict[str, Any] = {"mm_encoder_outputs": {"image": outputs}}
        if self.sees_ahead:
            given["mm_token_type_ids"] = (torch.tensor([list(ids)]) == self.token).to(torch.long)
        return given

    def positions(self, ids: Sequence[int], inputs: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor | None:
        """Return the positions [3, tokens] of a prompt in time, height and width; None if positions have one dimension.
        `inputs`: the tensors of the prompt's images, in order."""
        if not self._family.has_axes:
            return None
        given = torch.tensor([list(ids)])
        places, _ = self._model.model.get_rope_index(  # type: ignore[union-attr,operator]
            given, (given == self.token).to(torch.int), image_grid_thw=torch.cat([each[_GRID] for each in inputs])
        )
        found: torch.Tensor = places[:, 0]
        return found
