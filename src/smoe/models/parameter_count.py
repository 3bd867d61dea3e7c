"""Counts all parameters of a model, including experts on disk and quantized weights."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel


def count_whole(model: PreTrainedModel, shell: PreTrainedModel) -> None:
    """Make `model.num_parameters()` also count experts on disk and quantized weights, which are not parameters of the
    module.

    `shell`: the model with all its weights on the meta device. The added weights do not count as trainable.
    """
    original: Callable[..., int] = model.num_parameters
    elsewhere = {
        exclude: shell.num_parameters(exclude_embeddings=exclude) - original(exclude_embeddings=exclude)
        for exclude in (False, True)
    }

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        here = original(only_trainable, exclude_embeddings)
        return here if only_trainable else here + elsewhere[exclude_embeddings]

    model.num_parameters = num_parameters  # type: ignore[method-assign]
