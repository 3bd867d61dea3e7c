"""From files, budget and weights to an engine behind a model: tiers, predictors, arithmetic, seam, proof."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.config import EMULATED, EngineConfig
from smoe.errors import BudgetError, ConfigError, UnsupportedModelError
from smoe.kernels.crew import Crew, is_supported
from smoe.memory.device import Arena
from smoe.memory.disk import DiskReader
from smoe.memory.emulation import Clock, Emulation
from smoe.memory.free import free_device_bytes, less_margin
from smoe.memory.host import HostTier
from smoe.memory.link import CudaLink, EmulatedLink, Link
from smoe.memory.movers import Filler, HostMover, SlotMover
from smoe.memory.page_lock import CudaRegistry
from smoe.memory.store import ExpertStore, LayerExperts
from smoe.memory.streams import CudaStreams
from smoe.memory.transfer import Mover, Transfers
from smoe.models.experts import ExpertsSite
from smoe.models.prediction import LookAhead, NextGate
from smoe.models.scoring import ScoringRule, find_rule
from smoe.models.seam import attach
from smoe.models.selftest import check_experts
from smoe.planning import Blueprint
from smoe.policy.balance import Costs
from smoe.policy.budget import Ledger
from smoe.policy.eviction.lru import LRU
from smoe.policy.residency import SlotTable
from smoe.policy.trial import Trial
from smoe.routing import Phase
from smoe.runtime import attention, dense, norm
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.calibration import calibrate
from smoe.runtime.engine import Engine
from smoe.runtime.execute import LayerExecutor, Predictor
from smoe.runtime.expert_math import ExpertMath
from smoe.runtime.host_experts import Balancer, HostExperts
from smoe.runtime.split import choose_way

_PREFETCH_PAYS_BYTES = 1 << 20
"""Smaller experts are read in less time than guessing takes; for larger ones the gain is measured (docs/log.md)."""
_NEARLY_ALL = 0.9
"""Share of the linear weights that our kernel must have for the library to need no more than one thread."""


def assemble(
    model: PreTrainedModel,
    plan: Blueprint,
    config: EngineConfig,
    ledger: Ledger,
    reason: str,
    store: ExpertStore,
    arena: Arena,
    checkpoint: Mapping[int, LayerExperts],
    emulation: Emulation | None,
    on_host_tier: Callable[[int], None] | None = None,
) -> PreTrainedModel:
    """Put an engine behind `model`, whose experts were left out; the same object comes back.

    `on_host_tier` hears how many bytes of host memory are about to be backed and locked for a GPU: that takes a while.
    Raises `UnsupportedModelError` where the experts, or a rule that is needed, cannot be proven, and `ConfigError` for
    switches that this machine or family cannot have.
    """
    rules = _rules(model, plan) if config.needs_scores else {}
    predictors = _predictors(model, plan, config, rules, arena.device)
    table = SlotTable(ledger.cache_slots, ledger.staging_slots)
    clock = time.perf_counter if emulation is None else emulation.now
    with ExitStack() as made:  # closed, last first, where a later step fails
        tiers = _tiers(store, arena, table, config, emulation, on_host_tier)
        transfers = Transfers(tiers.mover, config.io_threads, clock)
        made.callback(transfers.close)
        executor = _executor(model, plan, store, arena, table, transfers, predictors, clock)
        made.callback(executor.math.close)
        _prove(model, plan, executor, checkpoint)
        _choose_arithmetic(model, plan, config, executor)
        executor.math.emulation = emulation
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
        _put_behind(model, plan, engine, predictors)
        balancer = _beside(executor, model, plan, config, store, tiers, emulation)
        if emulation is not None and tiers.link is not None and config.dilation is None:
            calibrate(model, emulation, tiers.link)
        executor.balancer = balancer  # not before: a calibration measures the device
        executor.prefill_balance, executor.prefill_keep = _balances_prompts(config, emulation), config.prefill_keep
        executor.start_anew(engine.fresh_eviction())
        executor.trial = Trial() if config.prefetch == "auto" else None
        executor.substitute_by(config)
        made.pop_all()  # from here on the engine closes them
    return model


def _executor(
    model: PreTrainedModel,
    plan: Blueprint,
    store: ExpertStore,
    arena: Arena,
    table: SlotTable,
    transfers: Transfers,
    predictors: Mapping[Phase, Predictor],
    clock: Clock,
) -> LayerExecutor:
    """The experts' arithmetic, and what brings the experts to it."""
    math = _math(model, plan)
    arrivals = Arrivals(
        store=store,
        table=table,
        eviction=LRU(),  # for the trials at load, in which no router speaks
        transfers=transfers,
        arena=arena,
        math=math,
        clock=clock,
    )
    return LayerExecutor(store=store, arrivals=arrivals, arena=arena, math=math, predictors=predictors, clock=clock)


def _math(model: PreTrainedModel, plan: Blueprint) -> dict[int, ExpertMath]:
    """Every layer's formulas, by the block that they stand in for."""
    modules = dict(model.named_modules())
    return {site.layer: ExpertMath(modules[site.name], site.parts, plan.dtype) for site in plan.sites}


def _prove(
    model: PreTrainedModel, plan: Blueprint, executor: LayerExecutor, checkpoint: Mapping[int, LayerExperts]
) -> None:
    """Compare experts of every distinct layout, as we compute them, with the library's own."""
    modules = dict(model.named_modules())
    for site in _one_of_each_kind(plan.sites):
        check_experts(site, modules[site.name], checkpoint[site.layer], executor, plan.dtype)


def _put_behind(model: PreTrainedModel, plan: Blueprint, engine: Engine, predictors: Mapping[Phase, Predictor]) -> None:
    """The blocks and the routers that are heard turn to the engine; a look-ahead listens to the layers."""
    attach(model, plan.sites, engine, {layer: plan.anatomy.routers[layer] for layer in engine.rules})
    look_ahead = predictors.get(Phase.DECODE)
    if isinstance(look_ahead, LookAhead):
        look_ahead.install()


def _beside(
    executor: LayerExecutor,
    model: PreTrainedModel,
    plan: Blueprint,
    config: EngineConfig,
    store: ExpertStore,
    tiers: _Tiers,
    emulation: Emulation | None,
) -> Balancer | None:
    """The CPU beside the device, and what shares the work out, where it is to compute what the device lacks."""
    method = config.balance
    if method == "auto":
        method = "none" if tiers.host is None else "optimal"
    if method == "none":
        return None
    assert tiers.host is not None and tiers.link is not None, "refused before loading"
    math = _math(model, plan)
    if executor.device.type != "cpu" and not all(layer.is_movable for layer in math.values()):
        raise ConfigError(f"--balance {method}: this family's experts end in a norm that only the device has; use none")
    threads = 1 if emulation is not None else torch.get_num_threads()
    host_experts = executor.math.host_experts = HostExperts(tiers.host, tiers.filler, store, math, threads, emulation)
    if emulation is None and config.kernels != "torch" and plan.dtype is torch.bfloat16 and is_supported():
        host_experts.multiply_by(Crew(threads))  # an acted device is timed with the library's products: docs/log.md
    fixed = None
    if config.reproducible and config.alpha > 0 and method != "host":
        if emulation is None:
            raise ConfigError(
                f"with --reproducible and an alpha above 0, --balance {method} would decide by measured times; "
                "use --balance none or host"
            )
        profile, nbytes = emulation.profile, store.expert_bytes
        many = 64
        token = profile.host_seconds(nbytes, many) / many
        fixed = Costs(profile.link_seconds(nbytes), profile.host_seconds(nbytes, 1), token=token)
    return Balancer(method, config.balance_order, tiers.link, executor.math.host_experts, fixed)


def _balances_prompts(config: EngineConfig, emulation: Emulation | None) -> bool:
    """Measured times must not decide what becomes resident where that decides what is computed."""
    return config.prefill_balance and not (config.reproducible and config.alpha > 0 and emulation is None)


def _choose_arithmetic(model: PreTrainedModel, plan: Blueprint, config: EngineConfig, executor: LayerExecutor) -> None:
    """Our kernel where it is wanted, gives the library's bits and is faster; several threads where they help."""
    if plan.dtype is torch.bfloat16 and executor.device.type == "cpu" and config.kernels != "torch":
        executor.math.fill_up_rows(plan.dtype)
    is_possible = plan.dtype is torch.bfloat16 and executor.device.type == "cpu" and is_supported()
    is_wanted = config.kernels != "torch" and is_possible
    crew = Crew(torch.get_num_threads(), several=config.max_sequences > 1) if is_wanted else None
    executor.math.compute_by(crew)  # whatever happens now, the executor closes it
    if crew is not None and not executor.math.agrees(crew):
        executor.math.compute_by(None)
        crew.close()
        crew = None
    choose_way(executor, plan.sites[0].layer, plan.dtype, crew, crew is not None and config.kernels == "own")
    if not is_possible or config.kernels == "torch":
        return
    norm.speed_up(model)
    # even on one thread our attention is several times faster than the library's on all
    attending = attention.speed_up(model, executor.math.crew if executor.math.crew is not None else Crew(1))
    if executor.math.crew is not None:
        gates = plan.anatomy.gates
        routers = {model.get_submodule(path): of in gates for of, path in plan.anatomy.routers.items()}
        share = dense.speed_up(model, executor.math.crew, routers)
        is_attending = attending == model.config.get_text_config().num_hidden_layers
        executor.leaves_little = is_attending and share > _NEARLY_ALL


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
    store: ExpertStore,
    arena: Arena,
    table: SlotTable,
    config: EngineConfig,
    emulation: Emulation | None,
    on_host_tier: Callable[[int], None] | None,
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
    registry = CudaRegistry(arena.device) if emulation is None else None
    if registry is not None and on_host_tier is not None:
        on_host_tier(slots * store.slot_bytes)
    host = HostTier(slots, store.slot_bytes, lambda copy: copy in table.ready, registry)
    link: Link = CudaLink(CudaStreams(arena.device)) if emulation is None else EmulatedLink(emulation)
    return _Tiers(HostMover(filler, reader, host, arena, link), filler, host, link)


def _reads_directly(config: EngineConfig, store: ExpertStore, spare_bytes: int) -> bool:
    """Past the page cache, unless RAM beside our own use holds every expert anyway."""
    if config.direct_io == "auto":
        return spare_bytes < store.total_bytes * 1.1
    return config.direct_io == "on"


def _one_of_each_kind(sites: list[ExpertsSite]) -> list[ExpertsSite]:
    """The first layer of every distinct layout."""
    return list({(site.experts, site.parts): site for site in reversed(sites)}.values())
