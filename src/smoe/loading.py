"""Putting an engine together: structure, index, budget, slots, weights, seam, proof. In this order, so that what cannot
work is refused before anything large is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as library_logging

from smoe.config import EngineConfig, configure
from smoe.errors import BudgetError, CheckpointError, ConfigError, UnsupportedModelError
from smoe.kernels.crew import Crew, is_supported
from smoe.memory.device import Arena
from smoe.memory.disk import DiskReader
from smoe.memory.emulation import Emulation, read_profile
from smoe.memory.free import free_device_bytes, less_margin
from smoe.memory.host import HostTier
from smoe.memory.link import CudaLink, EmulatedLink, Link
from smoe.memory.movers import Filler, HostMover, SlotMover
from smoe.memory.safetensors_index import index_checkpoint
from smoe.memory.store import ExpertStore, LayerExperts, page_ceil
from smoe.memory.transfer import Mover, Transfers
from smoe.models.expert_index import index_experts
from smoe.models.experts import ExpertsSite, without_expert_weights
from smoe.models.files import fetch
from smoe.models.packed import packed_store
from smoe.models.prediction import LookAhead, NextGate
from smoe.models.scoring import ScoringRule, find_rule
from smoe.models.seam import attach
from smoe.models.selftest import check_experts
from smoe.planning import SAFETENSORS_NAMES, Blueprint, blueprint
from smoe.policy.balance import Costs
from smoe.policy.budget import Demand, Ledger, allocate, full_bytes
from smoe.policy.eviction.lru import LRU
from smoe.policy.residency import SlotTable
from smoe.policy.trial import Trial
from smoe.routing import Phase
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.calibration import calibrate
from smoe.runtime.dense import speed_up
from smoe.runtime.engine import Engine
from smoe.runtime.execute import LayerExecutor, Predictor
from smoe.runtime.expert_math import ExpertMath
from smoe.runtime.host_experts import Balancer, HostExperts
from smoe.runtime.split import choose_way
from smoe.units import parse_bytes

EMULATED = "emulated"
"""The device that is acted on the CPU (`memory/emulation.py`)."""
_CUDA_ALIGNMENT = 256
"""What torch's own allocator gives on a GPU; its matrix kernels are slow, or choose others, at odd addresses."""
_PREFETCH_PAYS_BYTES = 1 << 20
"""Smaller experts are read in less time than guessing takes; for larger ones the gain is measured (docs/log.md)."""
_TOUCH_SECONDS = 2.0
"""How long loading waits for the slots' memory; the rest is backed while the model already runs."""


def from_pretrained(
    model: str | Path = "demo",
    *,
    memory: str | int | None = None,
    host_memory: str | int | None = None,
    preset: str = "exact",
    revision: str | None = None,
    **switches: Any,
) -> PreTrainedModel:
    """Load a Mixture-of-Experts model whose experts stay on disk until they are needed.

    Returns the ordinary transformers model object; `model.offload` is the `Engine` behind it. `memory` is the budget
    ("8GiB", bytes; None: what is free less a margin). `switches` are fields of `EngineConfig`, over those of `preset`.

    Raises `ConfigError` for bad settings, `BudgetError` (with the ledger) for a budget that cannot work, `ModelError`
    and its kinds for models that cannot be served exactly.
    """
    sizes = {"memory_bytes": memory, "host_memory_bytes": host_memory}
    switches |= {name: parse_bytes(size) for name, size in sizes.items() if size is not None}
    return load(model, configure(preset, **switches), revision)


def load(
    model: str | Path,
    config: EngineConfig,
    revision: str | None = None,
    on_ledger: Callable[[Ledger], None] | None = None,
) -> PreTrainedModel:
    """`from_pretrained` for a finished configuration; `on_ledger` hears the budget before anything large is read."""
    device = choose_device(config)
    profile = read_profile(config.profile) if config.device == EMULATED else None
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    plan = blueprint(model, config, revision)
    if config.memory_bytes is not None:  # what cannot work even in the best case is refused before a download
        allocate(config.memory_bytes, plan.demand(config, page_ceil(plan.expert_bytes)))
    folder = fetch(model, revision)
    checkpoint = checkpoint_experts(folder, plan)
    store = open_store(folder, plan, checkpoint, device)
    ledger, reason = make_ledger(plan, config, device, store)
    if on_ledger is not None:
        on_ledger(ledger)
    arena = Arena(ledger.cache_slots + ledger.staging_slots, store.slot_bytes, device)
    arena.touch()  # slower than the disk, and free beside the loading of the other weights
    loaded = _load_dense(folder, plan, device)
    arena.wait_touched(_TOUCH_SECONDS)
    emulation = None
    if profile is not None:
        layer_bytes = ledger.demand.weights_bytes / len(plan.sites)
        emulation = Emulation(profile, config.dilation, layer_bytes, store.expert_bytes)
    return _assemble(loaded, plan, config, ledger, reason, store, arena, checkpoint, emulation)


def checkpoint_experts(folder: Path, plan: Blueprint) -> dict[int, LayerExperts]:
    """Where the checkpoint itself, packed file or not, keeps its experts."""
    return index_experts(plan.shell, plan.sites, index_checkpoint(folder))


def open_store(
    folder: Path, plan: Blueprint, checkpoint: Mapping[int, LayerExperts], device: torch.device
) -> ExpertStore:
    """The experts' places on disk: the packed file where there is one for this dtype, else the checkpoint itself."""
    dtype = SAFETENSORS_NAMES[plan.dtype]
    alignment = _CUDA_ALIGNMENT if device.type == "cuda" else None
    return packed_store(folder, plan.sites, dtype, alignment) or ExpertStore(checkpoint, dtype, alignment)


def make_ledger(
    plan: Blueprint, config: EngineConfig, device: torch.device, store: ExpertStore | None = None
) -> tuple[Ledger, str]:
    """The budget divided, and where its size comes from; raises `BudgetError`."""
    demand = plan.demand(config) if store is None else demand_of(plan, config, device, store)
    if config.memory_bytes is not None:
        return allocate(config.memory_bytes, demand), "as asked"
    free, source = free_device_bytes(device)
    budget = min(less_margin(free), full_bytes(demand))
    whole = ", and the whole model fits" if budget == full_bytes(demand) else ""
    return allocate(budget, demand), f"{source} less a margin{whole}"


def demand_of(plan: Blueprint, config: EngineConfig, device: torch.device, store: ExpertStore) -> Demand:
    """What a model whose files are here asks of the budget."""
    # A thread needs two buffers where a demand load passes inside a prefetch; on a GPU they are host memory.
    has_host_tier = device.type != "cpu" or config.device == EMULATED
    buffers = 0 if has_host_tier else 2 * config.io_threads * store.staging_buffer_bytes
    return plan.demand(config, store.slot_bytes, buffers)


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
        raise ConfigError("no CUDA device is usable here; leave --device out to run on the CPU")
    return device


def _load_dense(folder: Path, plan: Blueprint, device: torch.device) -> PreTrainedModel:
    """The model by the library's own loader, without its experts."""
    plan.config._experts_implementation = "eager"
    with without_expert_weights(plan.shell), _quiet_library():
        loaded, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=plan.config,
            dtype=plan.dtype,
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
    if plan.dtype is torch.bfloat16 and device.type == "cpu":
        _move_to_own_memory(loaded)
    model: PreTrainedModel = loaded.to(device).eval().requires_grad_(False)
    return model


def _move_to_own_memory(model: PreTrainedModel) -> None:
    """Copy the weights out of the library's file mapping: pages that cannot be dropped, matrices at cache lines.

    A mapped matrix lies where the file's header puts it, which costs a seventh of its speed (docs/log.md). Only bf16:
    the bits of fp32 products depend on the address, and grade E0 means the library's own bits.
    """
    for parameter in model.parameters():  # tied parameters come once and stay tied
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _refuse_nan(model: PreTrainedModel, folder: Path) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter.sum())) and not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(f"{name!r} in {folder} holds NaN or infinity; download the checkpoint again")


def _assemble(
    model: PreTrainedModel,
    plan: Blueprint,
    config: EngineConfig,
    ledger: Ledger,
    reason: str,
    store: ExpertStore,
    arena: Arena,
    checkpoint: Mapping[int, LayerExperts],
    emulation: Emulation | None,
) -> PreTrainedModel:
    rules = _rules(model, plan) if config.needs_scores else {}
    predictors = _predictors(model, plan, config, rules, arena.device)
    table = SlotTable(ledger.cache_slots, ledger.staging_slots)
    tiers = _tiers(store, arena, table, config, emulation)
    clock = time.perf_counter if emulation is None else emulation.now
    transfers = Transfers(tiers.mover, config.io_threads, clock)
    modules = dict(model.named_modules())
    math = {site.layer: ExpertMath(modules[site.name], site.parts, plan.dtype) for site in plan.sites}
    arrivals = Arrivals(
        store=store,
        table=table,
        eviction=LRU(),  # for the trials below, in which no router speaks
        transfers=transfers,
        arena=arena,
        math=math,
        clock=clock,
    )
    executor = LayerExecutor(store=store, arrivals=arrivals, arena=arena, math=math, predictors=predictors, clock=clock)
    try:
        for site in _one_of_each_kind(plan.sites):
            check_experts(site, modules[site.name], checkpoint[site.layer], executor, plan.dtype)
    except BaseException:
        transfers.close()
        raise
    _choose_arithmetic(model, plan, config, executor)
    executor.emulation = emulation
    engine = Engine(
        config=config,
        model_config=plan.config,
        anatomy=plan.anatomy,
        ledger=ledger,
        store=store,
        arena=arena,
        transfers=transfers,
        executor=executor,
        budget_reason=reason,
        dense_bytes=_dense_bytes(model, ledger),
        context_tokens=plan.context_tokens,
        rules=rules,
    )
    attach(model, plan.sites, engine, {layer: plan.anatomy.routers[layer] for layer in rules})
    look_ahead = predictors.get(Phase.DECODE)
    if isinstance(look_ahead, LookAhead):
        look_ahead.install()
    if emulation is not None and tiers.link is not None and config.dilation is None:
        calibrate(model, emulation, tiers.link)
    _balance(executor, model, plan, config, store, tiers, emulation)
    executor.start_anew(engine.fresh_eviction())
    executor.trial = Trial() if config.prefetch == "auto" else None
    executor.substitute_by(config)
    return model


def _balance(
    executor: LayerExecutor,
    model: PreTrainedModel,
    plan: Blueprint,
    config: EngineConfig,
    store: ExpertStore,
    tiers: _Tiers,
    emulation: Emulation | None,
) -> None:
    """The CPU beside the device, where it is to compute what the device lacks."""
    method = config.balance
    if method == "auto":
        method = "none" if tiers.host is None else "optimal"
    if method == "none":
        return
    if tiers.host is None or tiers.link is None:
        raise ConfigError(f"--balance {method} needs a device beside the CPU; this machine computes on its CPU")
    modules = dict(model.named_modules())
    math = {site.layer: ExpertMath(modules[site.name], site.parts, plan.dtype) for site in plan.sites}
    if executor.device.type != "cpu" and not all(layer.is_movable for layer in math.values()):
        raise ConfigError(f"--balance {method}: this family's experts end in a norm that only the device has; use none")
    threads = 1 if emulation is not None else torch.get_num_threads()
    executor.host_experts = HostExperts(tiers.host, tiers.filler, store, math, threads, emulation)
    fixed = None
    if config.reproducible and config.alpha > 0 and method != "host":
        if emulation is None:
            raise ConfigError(
                f"with --reproducible and an alpha above 0, --balance {method} would decide by measured times; "
                "use --balance none or host"
            )
        profile, nbytes = emulation.profile, store.expert_bytes
        fixed = Costs(profile.link_seconds(nbytes), profile.host_seconds(nbytes, 1))
    executor.balancer = Balancer(method, config.balance_order, tiers.link, executor.host_experts, fixed)


def _choose_arithmetic(model: PreTrainedModel, plan: Blueprint, config: EngineConfig, executor: LayerExecutor) -> None:
    """Our kernel where it is wanted, gives the library's bits and is faster; several threads where they help."""
    is_possible = plan.dtype is torch.bfloat16 and executor.device.type == "cpu" and is_supported()
    crew = Crew(torch.get_num_threads()) if config.kernels != "torch" and is_possible else None
    if crew is not None and not executor.agrees(crew):
        crew.close()
        crew = None
    choose_way(executor, plan.sites[0].layer, plan.dtype, crew, crew is not None and config.kernels == "own")
    if executor.crew is not None:
        speed_up(model, executor.crew)


def _dense_bytes(model: PreTrainedModel, ledger: Ledger) -> int:
    """What the library has really allocated for the weights beside the experts; more than promised is refused."""
    tensors = [*model.parameters(), *model.buffers()]
    used: int = sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())  # tied weights once
    promised = ledger.demand.weights_bytes
    if used > promised:
        raise BudgetError(
            f"the non-expert weights take {used} bytes, {promised} were planned; please report this model"
        )
    return used


def _predictors(
    model: PreTrainedModel,
    plan: Blueprint,
    config: EngineConfig,
    rules: Mapping[int, ScoringRule],
    device: torch.device,
) -> Mapping[Phase, Predictor]:
    """A prefill always starts the next layer's reads early: nearly all are needed, so guessing is cheap and right."""
    next_gate = NextGate(model, plan.sites, plan.anatomy.gates, rules, config.prefetch_what)
    found: dict[Phase, Predictor] = {Phase.PREFILL: next_gate}
    how = config.prefetch
    if how == "auto" and plan.expert_bytes >= _PREFETCH_PAYS_BYTES:
        how = "look-ahead" if device.type != "cpu" or config.device == EMULATED else "next-gate"
    if config.reproducible and config.alpha > 0:
        return found
    if how == "next-gate":
        found[Phase.DECODE] = next_gate
    elif how == "look-ahead":
        found[Phase.DECODE] = LookAhead(model, plan.sites, plan.anatomy.routers, next_gate)
    return found


def _rules(model: PreTrainedModel, plan: Blueprint) -> dict[int, ScoringRule]:
    """How every layer's router scores and weighs; raises `UnsupportedModelError` where it cannot be proven."""
    modules, rules = dict(model.named_modules()), {}
    for site in plan.sites:
        name = plan.anatomy.routers.get(site.layer)
        if name is None:
            raise UnsupportedModelError(
                f"the router of layer {site.layer} could not be found, so its scores cannot be heard; without --alpha, "
                "and with an eviction other than score, the model works"
            )
        block = modules[site.name.rpartition(".")[0]]
        hidden, top_k = plan.config.get_text_config().hidden_size, plan.anatomy.top_k[site.layer]
        rules[site.layer] = find_rule(modules[name], block, hidden, site.experts, top_k, site.layer)
    return rules


class _Tiers(NamedTuple):
    """What lies below the device."""

    mover: Mover
    filler: Filler
    host: HostTier | None = None
    """None where the device's memory is the host's."""
    link: Link | None = None


def _tiers(
    store: ExpertStore, arena: Arena, table: SlotTable, config: EngineConfig, emulation: Emulation | None
) -> _Tiers:
    free, _ = free_device_bytes(torch.device("cpu"))
    if arena.device.type == "cpu" and emulation is None:
        reader = DiskReader(_reads_directly(config, store, free - arena.nbytes))
        filler = Filler(store, reader)
        return _Tiers(SlotMover(filler, reader, arena), filler)
    budget = config.host_memory_bytes if config.host_memory_bytes is not None else less_margin(free)
    least = 2 * config.io_threads + 1  # a demand load inside a prefetch on every reading thread, and the CPU's own
    slots = min(len(store.keys()), max(least, budget // store.slot_bytes))
    reader = DiskReader(_reads_directly(config, store, free - slots * store.slot_bytes))
    filler = Filler(store, reader)
    host = HostTier(slots, store.slot_bytes, lambda copy: copy in table.ready)
    link: Link = CudaLink(arena.device) if emulation is None else EmulatedLink(emulation)
    return _Tiers(HostMover(filler, reader, host, arena, link), filler, host, link)


def _reads_directly(config: EngineConfig, store: ExpertStore, spare_bytes: int) -> bool:
    """Past the page cache, unless RAM beside our own use holds every expert anyway."""
    if config.direct_io == "auto":
        return spare_bytes < store.total_bytes * 1.1
    return config.direct_io == "on"


def _one_of_each_kind(sites: list[ExpertsSite]) -> list[ExpertsSite]:
    """The first layer of every distinct layout."""
    return list({(site.experts, site.parts): site for site in reversed(sites)}.values())


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
