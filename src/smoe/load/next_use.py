"""Stores and reads estimators of the time until an expert's next use, which `smoe tune --eviction learned` trains on
recorded traces of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smoe.errors import ConfigError
from smoe.load.learned_file import NotLearnedError, Tensors, keep_learned, learned
from smoe.policy.eviction.learned import FEATURES, NextUse
from smoe.policy.registry import LEARNED

_FORMAT, _KIND = 2, "next-use"


@dataclass(frozen=True)
class TrainedNextUse:
    """An estimator of the next use, and the conditions of its training."""

    next_use: NextUse
    experts: dict[int, int]
    """The number of experts in each MoE layer, by layer."""
    decode_steps: int
    """The number of decode steps in all traces."""


def remember(folder: Path, trained: TrainedNextUse) -> Path:
    """Store the estimator of the model in `folder` in the user's cache, atomically. Return the path. Raises
    `OSError`."""
    parts = trained.next_use._asdict()
    fields = {"rate": parts.pop("rate"), "decode_steps": trained.decode_steps}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}
    return keep_learned(_KIND, _FORMAT, folder, tensors, fields)


def next_use_of(folder: Path, experts: Mapping[int, int]) -> tuple[NextUse, str]:
    """Return the estimator of the next use for the model in `folder`, and a text that says where it comes from.
    `experts`: the number of experts by layer.

    Raises `ConfigError` if there is no estimator for these weights and this format version.
    """
    try:
        return _estimate(*learned(_KIND, _FORMAT, folder), experts)
    except NotLearnedError as error:
        raise ConfigError(
            f"`eviction={LEARNED}`: {error}; run smoe record, then smoe tune on the model with `eviction={LEARNED}`, "
            "the trace as `cache` and the `memory` of your runs, once",
            setting="eviction",
            given=LEARNED,
            allowed="for models for which it has been trained",
        ) from error


def _estimate(tensors: Tensors, fields: Mapping[str, Any], experts: Mapping[int, int]) -> tuple[NextUse, str]:
    """Return the estimator that stored tensors and fields contain. Raise `NotLearnedError` if shapes do not match the
    model's experts."""
    next_use = NextUse(fields["rate"], **{name: part.numpy() for name, part in tensors.items()})
    layers, width = max(experts) + 1, max(experts.values())
    rank = next_use.target.shape[-1]
    shapes = {"weights": (FEATURES,), "usual": (layers, rank), "offset": (layers, width)}
    shapes |= dict.fromkeys(("source", "target"), (layers, width, rank))
    if any(tensors[name].shape != shape or not tensors[name].isfinite().all() for name, shape in shapes.items()):
        raise NotLearnedError(
            "the values that are stored for this eviction policy belong to a model with other layers or experts"
        )
    return next_use, f"as trained on {fields['decode_steps']} recorded steps"
