"""The type of what `from_pretrained` returns, for type checkers.

At run time the class of a loaded model is the library's own, so this is another name of `PreTrainedModel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from transformers import GenerationMixin

    from smoe.runtime.engine import Engine

    class OffloadedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        """A model of transformers that writes text, with an engine behind it."""

        offload: Engine  # type: ignore[assignment]
else:
    OffloadedModel = PreTrainedModel
