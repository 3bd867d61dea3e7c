"""The return type of `from_pretrained`, for type checkers: a transformers model with the attribute `offload`.

At run time a loaded model has the library's own class, so there `OffloadedModel` is another name of `PreTrainedModel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from transformers import GenerationMixin

    from smoe.runtime.engine import Engine

    class OffloadedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        """A language model of transformers whose attribute `offload` is its engine."""

        offload: Engine  # type: ignore[assignment]
else:
    OffloadedModel = PreTrainedModel
