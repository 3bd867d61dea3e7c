"""The return type of `from_pretrained`, for type checkers: a transformers model with the attribute `offload`.

At run time a loaded model has the library's own class, so there `OffloadedModel` is another name of `PreTrainedModel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, StoppingCriteria

    from smoe.runtime.engine import Engine

    class OffloadedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        """A language model of transformers whose attribute `offload` is its engine.

        The library's own declarations of these methods do not accept a model or a list of criteria.
        """

        offload: Engine  # type: ignore[assignment]

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Run one forward pass, as transformers' `forward`."""

        def generate(  # type: ignore[override]
            self,
            inputs: torch.Tensor | None = None,
            generation_config: GenerationConfig | None = None,
            logits_processor: Sequence[LogitsProcessor] | None = None,
            stopping_criteria: Sequence[StoppingCriteria] | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            """Return token ids [rows, tokens], or an output object, as transformers' `generate`."""
else:
    OffloadedModel = PreTrainedModel
