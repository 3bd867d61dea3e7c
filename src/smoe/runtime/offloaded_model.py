"""The type of the result of `from_pretrained`, for type checkers.

At run time a loaded model has the library's own class, so this is another name of `PreTrainedModel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from transformers import GenerationMixin

    from smoe.runtime.engine import Engine

    class OffloadedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        """A language model of transformers with an engine."""

        offload: Engine  # type: ignore[assignment]
else:
    OffloadedModel = PreTrainedModel
