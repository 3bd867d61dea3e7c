"""Refuses a budget that cannot hold a model, before the libraries that would load it are imported."""

from __future__ import annotations

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.load.device import planned_device
from smoe.load.ledger import fit_context, make_ledger, open_if_here, outside_budget
from smoe.machine.device import CPU
from smoe.models.files import local_place
from smoe.models.model_sizes import by_arithmetic
from smoe.models.plain_config import UndescribedError
from smoe.policy.budget import minimum_bytes
from smoe.policy.registry import predictor_kind


def refuse_early(model: str, config: EngineConfig) -> None:
    """Raise `BudgetError` if a local model does not fit its budget: the same error as loading would raise, but sooner.

    The check covers only model families and settings that need no library. Workers and low-precision copies are checked
    when the model is loaded. If the budget is sufficient, weight files are not read.
    """
    device, place = planned_device(config), local_place(model)
    asks_for_more = config.cluster is not None or config.has_low or config.precision != "auto"
    asks_for_more |= predictor_kind(config.prefetch).has_weights  # these take a part of the budget
    if config.memory_bytes is None or asks_for_more or place is None:
        return
    if device != CPU or config.device == EMULATED:
        return
    try:
        checkpoint, spec = by_arithmetic(place, config)
        outside = outside_budget(spec, config)
        spec, fitted, _ = fit_context(spec, config, lambda each: each.demand(config, each.least_slot_bytes()), outside)
        others = sum(outside.values()) if config.count == "process" else 0
        if minimum_bytes(spec.demand(fitted, spec.least_slot_bytes())) + others <= config.memory_bytes:
            return
        store = open_if_here(checkpoint, spec, CPU)
    except UndescribedError:
        return
    make_ledger(spec, fitted, CPU, store, outside=outside)
