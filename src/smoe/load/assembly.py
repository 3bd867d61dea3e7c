"""Put an engine behind a model: tiers, predictors, arithmetic, the connection to transformers, and the self-test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from smoe.bounds import DEFAULT_PREFETCH_DEPTH
from smoe.compute.host_experts import Balancer, HostExperts
from smoe.compute.unit import ComputeUnit
from smoe.config import EngineConfig
from smoe.errors import BudgetError, ConfigError, UnsupportedModelError
from smoe.expert import EXACT, LOW
from smoe.load.activations import activations_of
from smoe.load.calibration import calibrate
from smoe.load.choose_kernel import choose_arithmetic
from smoe.load.clustered import ClusterInputs, cluster_of
from smoe.load.experts_math import experts_math
from smoe.load.known import ResolvedSettings
from smoe.load.learned import LearnedValues
from smoe.load.predictor_name import predictor_name
from smoe.load.selftest import check_experts
from smoe.load.tiers import Tiers, make_tiers
from smoe.machine.processor import reading_threads
from smoe.memory.arena import Arena
from smoe.memory.emulation import Emulation
from smoe.memory.link import Link
from smoe.memory.pacing import Pacing
from smoe.memory.reading_threads import Transfers
from smoe.memory.store import ExpertStore, StoredLayer
from smoe.models.outline import ExpertsSite
from smoe.models.scoring import ScoringRule, check_weighs_outputs, find_rule
from smoe.models.spec import ModelSpec
from smoe.policy.answering import Answering
from smoe.policy.balance import Costs
from smoe.policy.budget import Ledger
from smoe.policy.eviction.lru import LRU
from smoe.policy.plan import HOST
from smoe.policy.prediction import ASKED, Listener, Predictor
from smoe.policy.prices import PriceTable
from smoe.policy.quality_budget import QualityBudget, TimeBudget, nats_of_perplexity
from smoe.policy.registry import predictor_kind
from smoe.policy.residency import SlotTable
from smoe.policy.trial import Trial
from smoe.prediction.inputs import PredictorInputs
from smoe.routing import Phase
from smoe.runtime.answer_costs import FIRST_BYTES_PER_SECOND, Answerer, LoadRate
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.engine import Engine
from smoe.runtime.execute import LayerExecutor
from smoe.runtime.layer import LayerCompute
from smoe.runtime.offloaded_model import OffloadedModel
from smoe.runtime.resident import pass_resident_experts
from smoe.runtime.running_ahead import DraftRouting
from smoe.runtime.seam import attach
from smoe.runtime.substitution import substitution_of

if TYPE_CHECKING:
    from smoe.cluster.remote import Cluster


class Budget(NamedTuple):
    """The memory budget of an engine, its reasons, and values measured before."""

    ledger: Ledger
    reason: str
    """The origin of the budget's size, in words."""
    known: ResolvedSettings
    """The settings with measured values in place of those that the user left out."""
    learned: LearnedValues
    weights: str = ""
    """The checkpoint's checksum, which a cluster's workers must share; empty without a cluster."""
    draft: DraftRouting | None = None
    """The routing of the draft model, if the prefetch uses one."""
    files: Mapping[str, Path] = MappingProxyType({})
    """The files that workers can download, by name."""


def assemble(
    model: PreTrainedModel,
    spec: ModelSpec,
    config: EngineConfig,
    budget: Budget,
    stores: Mapping[int, ExpertStore],
    arena: Arena,
    checkpoint: Mapping[int, Mapping[int, StoredLayer]],
    pacing: Pacing,
    on_host_tier: Callable[[int], None] | None = None,
) -> OffloadedModel:
    """Put an engine behind `model`, which was built without experts, and return the same object.

    `stores` and `checkpoint` have, by format, the locations of experts and the stored tensors to compare with.
    `on_host_tier` is called with the bytes of host memory that will be allocated and locked for a GPU, which takes a
    while. Raises `UnsupportedModelError` if experts or a required scoring rule cannot be verified, and `ConfigError`
    for settings that this machine or family does not support.
    """
    ledger, store = budget.ledger, stores[EXACT]
    if config.alpha > 0 or config.prices_answers:
        check_weighs_outputs(model.get_submodule(spec.sites[0].name))
    rules = scoring_rules(model, spec) if config.needs_scores else {}
    predictors = _predictors(model, spec, budget, rules, arena.device)
    table = SlotTable(*ledger.pools)
    with ExitStack() as made:  # closed in reverse order if a later step fails
        tiers = make_tiers(stores, arena, table, ledger.demand.all_classes, config, pacing, on_host_tier)
        transfers = Transfers(tiers.mover, reading_threads(config), pacing.now)
        made.callback(transfers.close)
        compute = _compute(model, spec, config, stores, arena, table, tiers, transfers, pacing)
        made.callback(compute.close)
        _prove(model, spec, LayerExecutor(compute=compute), checkpoint)
        arithmetic = choose_arithmetic(model, spec, config, compute, _host_threads(pacing))
        balancer = _balancer(config, tiers, compute.units.get(HOST), pacing, ledger.demand.slot_bytes)
        others = _others(model, spec, config, budget, compute, checkpoint, LoadRate(transfers, tiers.link), made)
        trial = Trial() if _is_on_trial(config) else None
        executor = LayerExecutor(
            compute=compute, predictors=predictors, balancer=others or balancer, trial=trial, upgrades=config.upgrade
        )
        engine = Engine(
            config=config,
            model_config=spec.config,
            anatomy=spec.anatomy,
            ledger=ledger,
            store=store,
            arena=arena,
            transfers=transfers,
            executor=executor,
            budget_reason=budget.reason,
            reasons=budget.known.reasons,
            eviction=config.eviction_settings._replace(next_use=budget.learned.next_use),
            dense_bytes=_dense_bytes(model, ledger),
            context_tokens=spec.context_tokens,
            rules=rules,
            leaves_little=arithmetic.leaves_little,
            leaves_little_of_prompts=arithmetic.leaves_little_of_prompts,
        )
        _put_behind(model, spec, engine, predictors, others)
        if arithmetic.token_pass is not None and _fits_whole(config, ledger, pacing):
            pass_resident_experts(arithmetic.token_pass, engine)
        answerer = _answerer(config, budget.known.prices, stores, transfers, tiers.link, balancer)
        _start(model, engine, answerer, tiers.link, pacing)
        made.pop_all()  # the engine closes them from here on
    return cast(OffloadedModel, model)  # the object keeps transformers' class


def _start(
    model: PreTrainedModel, engine: Engine, answerer: Answerer | None, link: Link | None, pacing: Pacing
) -> None:
    """Calibrate, reset all measurements, and enable the configured miss resolution; until then misses are loaded."""
    executor = engine.executor
    executor.reset(engine.fresh_eviction())  # the eviction policy of the self-test knows neither slot sizes nor formats
    if isinstance(pacing, Emulation) and link is not None and engine.config.dilation is None:
        calibrate(model, pacing, link)
        executor.reset(engine.fresh_eviction())
    executor.answerer = answerer
    executor.substitute_by(substitution_of(engine.config))
    if _is_preloaded(engine.config, engine.ledger, pacing):
        executor.arrivals.preload()


def _is_preloaded(config: EngineConfig, ledger: Ledger, pacing: Pacing) -> bool:
    return _fits_whole(config, ledger, pacing) if config.preload is None else config.preload


def _fits_whole(config: EngineConfig, ledger: Ledger, pacing: Pacing) -> bool:
    """Return whether all experts stay in memory once they are loaded."""
    return ledger.cache_slots >= ledger.demand.total_experts and not pacing.is_emulated and config.keeps_experts


def _compute(
    model: PreTrainedModel,
    spec: ModelSpec,
    config: EngineConfig,
    stores: Mapping[int, ExpertStore],
    arena: Arena,
    table: SlotTable,
    tiers: Tiers,
    transfers: Transfers,
    pacing: Pacing,
) -> LayerCompute:
    """Return the experts' arithmetic and the loads for it; nothing is tested or chosen yet."""
    store = stores[EXACT]
    math = {
        (layer, form): each
        for form, of in stores.items()
        for layer, each in experts_math(model, spec, of, activations_of(config, spec.dtype.torch, arena.device)).items()
    }
    arrivals = Arrivals(
        stores=stores,
        table=table,
        eviction=LRU(),  # for the self-test at load, which uses no router
        transfers=transfers,
        arena=arena,
        math=math,
        clock=pacing.now,
    )
    host_experts = _host_experts(model, spec, config, store, tiers, arena.device, pacing)
    return LayerCompute(store, arrivals, arena, math, {} if host_experts is None else {HOST: host_experts}, pacing)


def _others(
    model: PreTrainedModel,
    spec: ModelSpec,
    config: EngineConfig,
    budget: Budget,
    compute: LayerCompute,
    checkpoint: Mapping[int, Mapping[int, StoredLayer]],
    rate: LoadRate,
    made: ExitStack,
) -> Cluster | None:
    """Return the cluster, or None if none is configured; `made` closes what is opened for it."""
    if config.cluster is None:
        return None
    demand = budget.ledger.demand
    asked = ClusterInputs(budget.weights, rate.seconds_per_byte, demand, budget.files, checkpoint[EXACT], budget.draft)
    return cluster_of(model, spec, config, compute.store, compute, asked, made)


def _prove(
    model: PreTrainedModel,
    spec: ModelSpec,
    executor: LayerExecutor,
    checkpoint: Mapping[int, Mapping[int, StoredLayer]],
) -> None:
    """Compare experts of every distinct layout and format, as the engine computes them, with transformers' own."""
    modules = dict(model.named_modules())
    for site in _one_of_each_kind(spec.sites, executor.compute):
        for form, of in checkpoint.items():
            with executor.by_low_copies() if form == LOW else nullcontext():
                check_experts(site, modules[site.name], of[site.layer], executor, spec.dtype.torch)


def _put_behind(
    model: PreTrainedModel,
    spec: ModelSpec,
    engine: Engine,
    predictors: Mapping[Phase, Predictor],
    others: Listener | None,
) -> None:
    """Connect MoE blocks and observed routers to the engine, and predictors to the model and to the workers
    `others`."""
    attach(model, spec.sites, engine, {layer: spec.anatomy.routers[layer] for layer in engine.rules})
    for predictor in set(predictors.values()):
        predictor.install()
        if others is not None:
            predictor.speak_to(others)


def _host_experts(
    model: PreTrainedModel,
    spec: ModelSpec,
    config: EngineConfig,
    store: ExpertStore,
    tiers: Tiers,
    device: torch.device,
    pacing: Pacing,
) -> HostExperts | None:
    """Return the unit that computes missing experts on the CPU of a machine with a device, or None."""
    if _balance(config, tiers) == "none":
        return None
    assert tiers.host is not None, "refused before loading"
    math = experts_math(model, spec, store, activations_of(config, spec.dtype.torch, device))
    if device.type != "cpu" and not all(layer.is_movable for layer in math.values()):
        raise ConfigError(
            f"`balance` {_balance(config, tiers)}: this family's experts end in a norm that only the device has; use "
            "none",
            setting="balance",
            given=config.balance,
            allowed="none for this model",
        )
    return HostExperts(tiers.host, tiers.filler, store, math, _host_threads(pacing), pacing)


def _host_threads(pacing: Pacing) -> int:
    return 1 if pacing.is_emulated else torch.get_num_threads()


def _balance(config: EngineConfig, tiers: Tiers) -> str:
    """Return the name of the method by which missing experts are divided between CPU and link."""
    if config.balance == "auto":
        return "none" if tiers.host is None else "optimal"
    return config.balance


def _answerer(
    config: EngineConfig,
    prices: PriceTable | None,
    stores: Mapping[int, ExpertStore],
    transfers: Transfers,
    link: Link | None,
    balancer: Balancer | None,
) -> Answerer | None:
    """Return the resolver of decode misses within a limit of perplexity or time, or None if there is no limit."""
    if prices is None:
        return None
    slot_bytes = {form: store.slot_bytes for form, store in stores.items()}
    own_seconds = max(slot_bytes[EXACT].values()) / FIRST_BYTES_PER_SECOND
    first_rate = own_seconds / max(prices.typical, 1e-9)

    def make() -> Answering:
        if config.tpot_seconds is not None:
            return Answering(prices, TimeBudget(config.tpot_seconds, first_rate))
        assert config.max_perplexity_increase is not None
        return Answering(prices, QualityBudget(nats_of_perplexity(config.max_perplexity_increase), first_rate))

    return Answerer(make, slot_bytes, LoadRate(transfers, link), balancer)


def _balancer(
    config: EngineConfig, tiers: Tiers, host: ComputeUnit | None, pacing: Pacing, own_bytes: int
) -> Balancer | None:
    """Return the balancer of missing experts between the link and the CPU, or None if the CPU computes no
    experts."""
    if host is None:
        return None
    assert tiers.link is not None, "where there is a host tier there is a link"
    method, fixed = _balance(config, tiers), None
    by_measured_times = config.reproducible and config.alpha > 0 and not pacing.is_emulated
    if by_measured_times and method != "host":
        raise ConfigError(
            f"with `reproducible` and an alpha above 0, `balance` {method} would decide by measured times; "
            "use `balance` none or host",
            setting="balance",
            given=config.balance,
            allowed="none or host",
        )
    if config.reproducible and config.alpha > 0 and method != "host" and isinstance(pacing, Emulation):
        profile, nbytes = pacing.profile, pacing.expert_bytes
        many = 64
        token = profile.host_seconds(nbytes, many) / many
        fixed = Costs(profile.link_seconds(nbytes), profile.host_seconds(nbytes, 1), token=token)
    # measured times must not influence results through residency
    shares_prompts = config.prefill_balance and not by_measured_times
    recent = config.recent_costs
    return Balancer(method, config.balance_order, tiers.link, host, pacing, fixed, shares_prompts, recent, own_bytes)


def _dense_bytes(model: PreTrainedModel, ledger: Ledger) -> int:
    """Return the bytes that transformers allocated for the non-expert weights; raises `BudgetError` if they exceed the
    plan."""
    tensors = [*model.parameters(), *model.buffers()]
    used: int = sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())  # tied weights count once
    promised = ledger.weights_bytes
    if used > promised:
        raise BudgetError(
            f"the non-expert weights take {used} bytes, {promised} were planned; please report this model"
        )
    return used


def _predictors(
    model: PreTrainedModel,
    spec: ModelSpec,
    budget: Budget,
    rules: Mapping[int, ScoringRule],
    device: torch.device,
) -> Mapping[Phase, Predictor]:
    """Return the predictor of each phase. A prefill always predicts by the next gate: nearly all experts are needed."""
    config, learned = budget.known.config, budget.learned
    depth = config.prefetch_depth or DEFAULT_PREFETCH_DEPTH
    what = config.prefetch_what
    subject = PredictorInputs(model, spec, rules, what, depth, learned.corrections, learned.fitted, budget.draft)
    found: dict[Phase, Predictor] = {Phase.PREFILL: subject.next_gate}
    decode = predictor_kind(predictor_name(spec, config, device)).make(subject)
    if decode is not None and config.prefetch_asked is not None:
        decode.asked = ASKED[config.prefetch_asked]
    return found if decode is None else found | {Phase.DECODE: decode}


def _is_on_trial(config: EngineConfig) -> bool:
    return config.prefetch == "auto" if config.prefetch_trial is None else config.prefetch_trial


def scoring_rules(model: PreTrainedModel, spec: ModelSpec) -> dict[int, ScoringRule]:
    """Return the scoring rule of every layer's router; raises `UnsupportedModelError` if one cannot be verified."""
    modules, rules = dict(model.named_modules()), {}
    for site in spec.sites:
        name = spec.anatomy.routers.get(site.layer)
        if name is None:
            raise UnsupportedModelError(
                f"the router of layer {site.layer} could not be found, so its scores cannot be read; leave out "
                "`alpha`, and use an `eviction` other than score and a `prefetch` other than stacked-gates"
            )
        block = modules[site.name.rpartition(".")[0]]
        hidden, top_k = spec.config.get_text_config().hidden_size, spec.anatomy.top_k[site.layer]
        rules[site.layer] = find_rule(modules[name], block, hidden, site.experts, top_k, site.layer)
    return rules


def _one_of_each_kind(sites: list[ExpertsSite], compute: LayerCompute) -> list[ExpertsSite]:
    """Return the first layer of every distinct layout."""
    return list({(site.experts, site.parts, compute.kind(site.layer)): site for site in reversed(sites)}.values())
