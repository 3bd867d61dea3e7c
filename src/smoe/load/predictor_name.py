"""Chooses the predictor of the next layers' experts, by name."""

from __future__ import annotations

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.machine.device import AnyDevice
from smoe.models.spec import ModelSpec

_PREFETCH_PAYS_BYTES = 1 << 20
"""The size in bytes below which reading an expert is faster than predicting it. For larger ones the gain is measured
(docs/log/prefetch.md)."""


def predictor_name(spec: ModelSpec, config: EngineConfig, device: AnyDevice) -> str:
    """Return the name of the predictor for decode. It is "none" if a prediction could change the results of a run that
    must be reproducible, or if prefetching does not pay."""
    if config.reproducible and config.alpha > 0:
        return "none"
    if config.prefetch != "auto":
        return config.prefetch
    is_emulated = config.device == EMULATED
    stands_for = config.emulated_expert_bytes if is_emulated else None
    if (spec.expert_bytes if stands_for is None else stands_for) < _PREFETCH_PAYS_BYTES:
        return "none"
    return "look-ahead" if device.type != "cpu" or is_emulated else "next-gate"
