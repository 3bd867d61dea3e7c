"""Putting an engine together: structure, index, budget, slots, weights, seam, proof. In this order, so that what cannot
work is refused before anything large is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as library_logging

from smoe.config import EMULATED, EngineConfig, configure
from smoe.errors import CheckpointError, ConfigError
from smoe.load.assembly import Budget, assemble
from smoe.load.priced_alpha import threshold_of
from smoe.machine.available_memory import free_device_bytes, less_margin
from smoe.machine.process_memory import note_start
from smoe.memory.arena import Arena, forget_peak
from smoe.memory.dtypes import SAFETENSORS
from smoe.memory.emulation import Emulation, read_profile
from smoe.memory.pacing import Pacing
from smoe.memory.safetensors_index import index_checkpoint
from smoe.memory.store import MATRIX_ALIGNMENT, ExpertStore, LayerExperts, page_ceil
from smoe.models.expert_index import index_experts, stored_as
from smoe.models.experts import without_expert_weights
from smoe.models.files import fetch, local_folder, naming
from smoe.models.generation_file import check_generation
from smoe.models.packed import packed_store
from smoe.models.spec import ModelSpec, read_spec
from smoe.policy.budget import Demand, Ledger, allocate, budget_for_share, full_bytes
from smoe.runtime.lifetime import collect_dropped
from smoe.units import parse_bytes, parse_share

_CUDA_ALIGNMENT = 256
"""What torch's own allocator gives on a GPU; its matrix kernels are slow, or choose others, at odd addresses."""
_TOUCH_SECONDS = 2.0
"""How long loading waits for the slots' memory; the rest is backed while the model already runs."""


def from_pretrained(
    model: str | Path = "demo",
    *,
    memory: str | int | None = None,
    resident: str | float | None = None,
    host_memory: str | int | None = None,
    preset: str = "exact",
    revision: str | None = None,
    **switches: Any,
) -> PreTrainedModel:
    """Load a Mixture-of-Experts model whose experts stay on disk until they are needed.

    Returns the ordinary transformers model object; `model.offload` is the `Engine` behind it. `memory` is the budget
    ("8GiB", bytes; None: what is free less a margin); `resident` ("40%", 0.4) asks for as much as keeps that share of
    the routed experts in memory instead. `switches` are fields of `EngineConfig`, over those of `preset`; `dtype` and
    `device` may be torch's own objects.

    Raises `ConfigError` for bad settings, `BudgetError` (with the ledger) for a budget that cannot work, `ModelError`
    and its kinds for models that cannot be served exactly.
    """
    if resident is not None:
        switches["resident_share"] = parse_share(resident) if isinstance(resident, str) else resident
    sizes = {"memory_bytes": memory, "host_memory_bytes": host_memory}
    switches |= {name: parse_bytes(size) for name, size in sizes.items() if size is not None}
    torch_s_own = {name: given for name, given in switches.items() if isinstance(given, (torch.dtype, torch.device))}
    switches |= {name: str(given).removeprefix("torch.") for name, given in torch_s_own.items()}
    return load(model, configure(preset, **switches), revision)


def load(
    model: str | Path,
    config: EngineConfig,
    revision: str | None = None,
    on_ledger: Callable[[Ledger], None] | None = None,
    on_host_tier: Callable[[int], None] | None = None,
) -> PreTrainedModel:
    """`from_pretrained` for a finished configuration; `on_ledger` hears the budget before anything large is read, and
    `on_host_tier` the bytes of host memory that are about to be locked beside a GPU."""
    collect_dropped()
    note_start()
    device = choose_device(config)
    profile = read_profile(config.profile) if config.device == EMULATED else None
    if device.type == "cpu" and profile is None and config.balance not in ("auto", "none"):
        raise ConfigError(
            f"balance {config.balance} (an option, or part of a preset) needs a device beside the CPU; this machine "
            "computes on its CPU: use another preset, or `device` emulated as a test bench"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    spec = read_spec(model, config, revision)
    folder = local_folder(model)
    checkpoint = None if folder is None else checkpoint_experts(folder, spec)  # a damaged file first, not its sizes
    if config.memory_bytes is not None:  # what cannot work even in the best case is refused before a download
        allocate(config.memory_bytes, spec.demand(config, page_ceil(spec.expert_bytes)))
    if folder is None or checkpoint is None:
        folder = fetch(model, revision)
        checkpoint = checkpoint_experts(folder, spec)
    store = open_store(folder, spec, checkpoint, device)
    ledger, reason = make_ledger(spec, config, device, store)
    if on_ledger is not None:
        on_ledger(ledger)
    alpha_reason = None
    if config.alpha_as_priced:
        alpha, alpha_reason = threshold_of(folder, ledger.resident_share)
        config = replace(config, alpha=alpha, alpha_as_priced=False)
    forget_peak(device)
    arena = Arena(ledger.cache_slots + ledger.staging_slots, store.slot_bytes, device)
    try:
        arena.touch()  # slower than the disk, and free beside the loading of the other weights
        loaded = _load_dense(folder, spec, device)
        arena.wait_touched(_TOUCH_SECONDS)
        pacing = Pacing()
        if profile is not None:
            layer_bytes = ledger.demand.weights_bytes / len(spec.sites)
            pacing = Emulation(profile, config.dilation, layer_bytes, store.expert_bytes, config.emulated_expert_bytes)
        budget = Budget(ledger, reason, alpha_reason)
        return assemble(loaded, spec, config, budget, store, arena, checkpoint, pacing, on_host_tier)
    except BaseException:
        arena.close()
        raise


def checkpoint_experts(folder: Path, spec: ModelSpec) -> dict[int, LayerExperts]:
    """Where the checkpoint itself, packed file or not, keeps its experts."""
    return index_experts(folder, spec.shell, spec.sites, index_checkpoint(folder))


def open_store(
    folder: Path, spec: ModelSpec, checkpoint: Mapping[int, LayerExperts], device: torch.device
) -> ExpertStore:
    """The experts' places on disk: the packed file where there is one for this dtype, else the checkpoint itself."""
    dtype = SAFETENSORS[spec.dtype]
    alignment = _CUDA_ALIGNMENT if device.type == "cuda" else None
    return packed_store(folder, spec.sites, dtype, alignment) or ExpertStore(checkpoint, dtype, alignment)


def make_ledger(
    spec: ModelSpec, config: EngineConfig, device: torch.device, store: ExpertStore | None = None
) -> tuple[Ledger, str]:
    """The budget divided, and where its size comes from; raises `BudgetError`."""
    demand = spec.demand(config) if store is None else demand_of(spec, config, device, store)
    if config.memory_bytes is not None:
        return allocate(config.memory_bytes, demand), "as asked"
    if config.resident_share is not None:
        budget = budget_for_share(config.resident_share, demand)
        return allocate(budget, demand), f"for {100 * config.resident_share:.3g}% of the experts"
    free, source = free_device_bytes(device)
    budget = min(less_margin(free), full_bytes(demand))
    whole = ", and the whole model fits" if budget == full_bytes(demand) else ""
    return allocate(budget, demand), f"{source} less a margin{whole}"


def demand_of(spec: ModelSpec, config: EngineConfig, device: torch.device, store: ExpertStore) -> Demand:
    """What a model whose files are here asks of the budget."""
    # A thread needs two buffers where a demand load passes inside a prefetch; on a GPU they are host memory.
    has_host_tier = device.type != "cpu" or config.device == EMULATED
    buffers = 0 if has_host_tier else 2 * config.io_threads * store.staging_buffer_bytes
    return spec.demand(config, store.slot_bytes, buffers)


def choose_device(config: EngineConfig) -> torch.device:
    """The device asked for, else the first GPU, else the CPU."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == EMULATED:
        return torch.device("cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {config.device!r}; use cpu, cuda, cuda:1 or emulated") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {config.device!r} is not supported; use cpu, cuda or emulated")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is usable here; leave `device` out to run on the CPU")
    return device


def _load_dense(folder: Path, spec: ModelSpec, device: torch.device) -> PreTrainedModel:
    """The model by the library's own loader, without its experts."""
    spec.config._experts_implementation = "eager"
    check_generation(folder)
    with without_expert_weights(spec.shell), _quiet_library(), naming(f"cannot load the weights in {folder}"):
        loaded, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=spec.config,
            dtype=spec.dtype,
            experts_implementation="eager",
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported below, as an error of ours
            output_loading_info=True,
        )
    mismatched = sorted(entry[0] for entry in info["mismatched_keys"])
    if mismatched:
        raise CheckpointError(f"{mismatched[0]!r} in {folder} has another shape than its config.json says")
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights, {missing[0]!r} first; the checkpoint is incomplete"
        )
    _refuse_nan(loaded, folder)
    if device.type == "cpu":
        _move_to_own_memory(loaded)
    model: PreTrainedModel = loaded.to(device).eval().requires_grad_(False)
    return model


def _move_to_own_memory(model: PreTrainedModel) -> None:
    """Copy the weights out of the library's file mapping: a mapped file that is cut short kills the process, one that
    is overwritten changes the model, and mapped pages can be dropped.

    bf16 matrices go to cache lines: where the header puts them they cost a seventh of their speed (docs/log.md). The
    bits of other products depend on the address within a cache line, and grade E0 means the library's own bits: they
    stay where they were within theirs.
    """
    for parameter in model.parameters():  # tied parameters come once and stay tied
        parameter.data = _own(parameter.data)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = _own(buffer)  # a new object: the old one is a view, which keeps its base


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return _aligned_copy(tensor, 0 if tensor.dtype is torch.bfloat16 else tensor.data_ptr())


def _aligned_copy(tensor: torch.Tensor, address: int) -> torch.Tensor:
    """A contiguous copy at an address that leaves the same remainder as `address` modulo the cache line."""
    memory = np.empty(tensor.nbytes + MATRIX_ALIGNMENT, dtype=np.uint8)
    begin = (address - memory.ctypes.data) % MATRIX_ALIGNMENT
    copy = torch.from_numpy(memory[begin : begin + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def _refuse_nan(model: PreTrainedModel, folder: Path) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter.sum())) and not bool(torch.isfinite(parameter).all()):
            where = stored_as(model, name, index_checkpoint(folder))
            raise CheckpointError(f"{where} holds NaN or infinity ({folder}); download the checkpoint again")


@contextmanager
def _quiet_library() -> Iterator[None]:
    """The loader would report every expert key as unexpected: that is what we want it to do with them."""
    level = library_logging.get_verbosity()
    library_logging.set_verbosity(logging.ERROR)
    bars = library_logging.is_progress_bar_enabled()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(level)
        if bars:
            library_logging.enable_progress_bar()
