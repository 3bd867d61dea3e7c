"""How many parameters a model has: all of them, wherever they are."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel


def count_whole(model: PreTrainedModel, shell: PreTrainedModel) -> None:
    """Let `model.num_parameters()` count what is on disk, and what is no parameter here because its weights
    stay quantised, as in `shell`, the same model whole on the meta device. None of these can be trained."""
    original: Callable[..., int] = model.num_parameters
    elsewhere = {
        exclude: shell.num_parameters(exclude_embeddings=exclude) - original(exclude_embeddings=exclude)
        for exclude in (False, True)
    }

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        here = original(only_trainable, exclude_embeddings)
        return here if only_trainable else here + elsewhere[exclude_embeddings]

    model.num_parameters = num_parameters  # type: ignore[method-assign]
