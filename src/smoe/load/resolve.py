"""Finds a model's files, its structure and where its experts are stored, and checks the settings against them.

This is the first of the four steps of loading, which make `Resolved`, `Divided`, `EngineParts` and `Engine`. Each step
begins when the previous one is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.errors import ConfigError, UnpreparedError
from smoe.expert import EXACT, LOW
from smoe.formats.registry import FORMATS
from smoe.kernels import matrix
from smoe.load.check_cluster import check_cluster
from smoe.load.choose_kernel import is_native
from smoe.load.device import choose_device
from smoe.load.draft_model import placed_draft
from smoe.load.draft_size import least_draft_bytes
from smoe.load.experts_math import activations_of
from smoe.load.ledger import demand_of, fit_context, open_store, outside_budget
from smoe.machine.processor import set_compute_threads
from smoe.memory.emulation import DeviceProfile, read_emulated
from smoe.memory.quantised_store import QuantisedStore
from smoe.memory.store import ExpertStore, StoredLayer
from smoe.models.checkpoint import Checkpoint, local_checkpoint, whole_checkpoint
from smoe.models.read_spec import read_spec, spec_of_whole
from smoe.models.spec import LibrarySpec
from smoe.policy.budget import allocate
from smoe.units import format_bytes


class Resolved(NamedTuple):
    """A model, and the settings that do not depend on memory. Only headers of files have been read."""

    checkpoint: Checkpoint
    spec: LibrarySpec
    config: EngineConfig
    device: torch.device
    stored: Mapping[int, Mapping[int, StoredLayer]]
    """The stored tensors of every layer's experts, by format."""
    stores: Mapping[int, ExpertStore]
    """How experts are read into slots, by format. They come from the checkpoint or from a pack."""
    profile: DeviceProfile | None = None
    """The device to emulate, or None."""
    outside: Mapping[str, int] = {}
    """The bytes of memory that the process needs outside the budget, by purpose."""
    reasons: Mapping[str, str] = {}
    """The origin of each setting that the user left out, by its name."""


def resolve(model: str | Path, config: EngineConfig, revision: str | None) -> Resolved:
    """Find a model's files, and download them if necessary. Return them with the settings that do not depend on memory.

    Raises `ConfigError` for settings that this machine or model does not support, and `ModelError` or a subclass for
    models that smoe cannot compute. Raises `BudgetError` for a budget that is too small, before anything is downloaded.
    """
    device = choose_device(config)
    profile = read_emulated(config.profile) if config.device == EMULATED else None
    if device.type == "cpu" and profile is None:
        _check_balance(config)
        _check_host_memory(config)
    set_compute_threads(config.threads)
    check_cluster(config)
    config = placed_draft(config)
    checkpoint, spec, stored = _open_checkpoint(model, config, revision)
    stores = {form: open_store(checkpoint, spec, of, device) for form, of in stored.items()}
    outside = outside_budget(spec, config)
    spec, config, fitted = fit_context(
        spec, config, lambda each: demand_of(each, config, device, stores[EXACT]), outside
    )
    _compile_ahead(spec, config, list(stores.values()), device)
    return Resolved(checkpoint, spec, config, device, stored, stores, profile, outside, fitted)


def _compile_ahead(
    spec: LibrarySpec, config: EngineConfig, stores: Sequence[ExpertStore], device: torch.device
) -> None:
    """Begin to compile the kernels of the model's formats, if the CPU will use them."""
    if device.type != "cpu" or config.device == EMULATED or not is_native(spec, config, device):
        return
    forms = [FORMATS[tensor.dtype] for tensor in spec.dense.values() if tensor.dtype in FORMATS]
    for store in stores:
        if isinstance(store, QuantisedStore):
            forms += [stored.form for layer in store.layers for stored in store.matrices(layer)]
    matrix.compile_ahead(forms, activations_of(config, spec.dtype.torch, device))


def _open_checkpoint(
    model: str | Path, config: EngineConfig, revision: str | None
) -> tuple[Checkpoint, LibrarySpec, Mapping[int, Mapping[int, StoredLayer]]]:
    """Return a model's files (downloaded if necessary), its spec, and the stored experts of every format.

    Raise `BudgetError` for a budget that is too small, before anything is downloaded.
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


def _check_host_memory(config: EngineConfig) -> None:
    """Raise `ConfigError` if a host tier is configured although the CPU is the only device."""
    if config.host_memory_bytes is not None:
        raise ConfigError(
            f"`host_memory` is {format_bytes(config.host_memory_bytes)}, and it has an effect only with a GPU, which "
            "this model does not compute on; leave out `host_memory` (on a CPU, `memory` is the memory for experts)",
            setting="host_memory_bytes",
            given=config.host_memory_bytes,
            allowed="only with `device=cuda` or `device=emulated`",
        )


def _check_balance(config: EngineConfig) -> None:
    """Raise `ConfigError` if `balance` would divide experts although the CPU is the only device."""
    if config.balance not in ("auto", "none"):
        raise UnpreparedError(
            f"`balance={config.balance}` (an option, or part of a preset) needs a device in addition to the CPU, "
            "which this machine lacks: use another preset, or `device=emulated`, which emulates a device",
            setting="balance",
            given=config.balance,
            allowed="auto or none on a CPU",
        )
