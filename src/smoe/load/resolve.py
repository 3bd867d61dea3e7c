"""Resolve a model's name and settings: its files, its structure and the places of its experts.

This is the first of the four values of loading, `Resolved` -> `Divided` -> `Parts` -> `Engine`; each is finished before
the next begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.errors import UnpreparedError
from smoe.expert import EXACT, LOW
from smoe.load.clustered import check_cluster
from smoe.load.device import choose_device
from smoe.load.draft_model import placed_draft
from smoe.load.draft_size import least_draft_bytes
from smoe.load.ledger import demand_of, fit_context, open_store, outside_budget
from smoe.machine.processor import set_compute_threads
from smoe.memory.emulation import DeviceProfile, read_emulated
from smoe.memory.store import ExpertStore, StoredLayer
from smoe.models.checkpoint import Checkpoint, local_checkpoint, whole_checkpoint
from smoe.models.read_spec import read_spec, spec_of_whole
from smoe.models.spec import LibrarySpec
from smoe.policy.budget import allocate


class Resolved(NamedTuple):
    """A model and the settings that do not depend on memory; only headers have been read."""

    checkpoint: Checkpoint
    spec: LibrarySpec
    config: EngineConfig
    device: torch.device
    stored: Mapping[int, Mapping[int, StoredLayer]]
    """The stored tensors of every layer's experts, by format."""
    stores: Mapping[int, ExpertStore]
    """How the experts are read into slots, by format: from the checkpoint, or from a pack."""
    profile: DeviceProfile | None = None
    """The device to emulate; None: none."""
    outside: Mapping[str, int] = {}
    """What the process needs outside the budget, by name."""
    reasons: Mapping[str, str] = {}
    """The origin of settings that the user left out, by name."""


def resolve(model: str | Path, config: EngineConfig, revision: str | None) -> Resolved:
    """Find a model's files, and download them if necessary.

    Raises `ConfigError` for settings that this machine or model does not support, `ModelError` and its subclasses for
    models that cannot be served, and `BudgetError` for an insufficient budget, before a download.
    """
    device = choose_device(config)
    profile = read_emulated(config.profile) if config.device == EMULATED else None
    if device.type == "cpu" and profile is None:
        _check_balance(config)
    set_compute_threads(config.threads)
    check_cluster(config)
    config = placed_draft(config)
    checkpoint, spec, stored = _open_checkpoint(model, config, revision)
    stores = {form: open_store(checkpoint, spec, of, device) for form, of in stored.items()}
    outside = outside_budget(spec, config)
    spec, config, fitted = fit_context(
        spec, config, lambda each: demand_of(each, config, device, stores[EXACT]), outside
    )
    return Resolved(checkpoint, spec, config, device, stored, stores, profile, outside, fitted)


def _open_checkpoint(
    model: str | Path, config: EngineConfig, revision: str | None
) -> tuple[Checkpoint, LibrarySpec, Mapping[int, Mapping[int, StoredLayer]]]:
    """Return a model's files (downloaded if necessary), its spec, and the experts of every format.

    An insufficient budget is refused before a download.
    """
    spec = read_spec(model, config, revision)
    checkpoint = local_checkpoint(model)
    # errors of a damaged file come before those of its sizes
    experts = None if checkpoint is None else checkpoint.experts(spec)
    if config.memory_bytes is not None and config.count == "budget" and checkpoint is None:
        draft_bytes = least_draft_bytes(model, spec, config, revision)
        fewest, _, _ = fit_context(spec, config, lambda each: each.demand(config, each.least_slot_bytes()), {})
        least = fewest.demand(config, fewest.least_slot_bytes())
        allocate(config.memory_bytes, replace(least, draft_bytes=draft_bytes))
    if checkpoint is None or experts is None:
        checkpoint = whole_checkpoint(model, revision)
        spec = spec_of_whole(checkpoint, spec, config)
        experts = checkpoint.experts(spec)
    low = {} if spec.low is None else {LOW: checkpoint.experts(spec.low)}
    return checkpoint, spec, {EXACT: experts} | low


def _check_balance(config: EngineConfig) -> None:
    """Raise `ConfigError` if the device is the CPU, which cannot also be a second unit."""
    if config.balance not in ("auto", "none"):
        raise UnpreparedError(
            f"`balance` {config.balance} (an option, or part of a preset) needs a device in addition to the CPU, "
            "which this machine lacks: use another preset, or `device` emulated as a test bench",
            setting="balance",
            given=config.balance,
            allowed="auto or none on a CPU",
        )
