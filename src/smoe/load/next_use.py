"""Stores and reads estimators of the time until an expert's next use, which `smoe tune --eviction learned` trains on
recorded traces of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from smoe.errors import ConfigError
from smoe.load.learned_file import LearnedValue, ModelShape, NotLearnedError, Tensors
from smoe.policy.eviction.learned import FEATURES, NextUse
from smoe.policy.registry import LEARNED


@dataclass(frozen=True)
class TrainedNextUse(LearnedValue):
    """An estimator of the next use, and the conditions of its training."""

    setting = "eviction"
    name = LEARNED
    kind = "next-use"
    how = (
        "smoe record, then smoe tune on the model with `eviction={name}`, the trace as `cache` and the `memory` of "
        "your runs"
    )
    error = ConfigError

    next_use: NextUse
    decode_steps: int
    """The number of decode steps in all traces."""

    @property
    def nbytes(self) -> int:
        return self.next_use.nbytes

    @property
    def origin(self) -> str:
        return f"as trained on {self.decode_steps} recorded steps"

    def contents(self) -> tuple[Tensors, dict[str, Any]]:
        parts = self.next_use._asdict()
        fields = {"rate": parts.pop("rate"), "decode_steps": self.decode_steps}
        return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}, fields

    @classmethod
    def of_contents(cls, name: str, tensors: Tensors, fields: dict[str, Any], model: ModelShape) -> TrainedNextUse:
        next_use = NextUse(fields["rate"], **{name: part.numpy() for name, part in tensors.items()})
        layers, width = max(model.experts) + 1, max(model.experts.values())
        rank = next_use.target.shape[-1]
        shapes = {"weights": (FEATURES,), "usual": (layers, rank), "offset": (layers, width)}
        shapes |= dict.fromkeys(("source", "target"), (layers, width, rank))
        if any(tensors[part].shape != shape or not tensors[part].isfinite().all() for part, shape in shapes.items()):
            raise NotLearnedError(
                "the values that are stored for this eviction policy belong to a model with other layers or experts"
            )
        return cls(next_use, fields["decode_steps"])
