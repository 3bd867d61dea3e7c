"""Put an engine behind a model: tiers, predictors, arithmetic, the connection to transformers, and the self-test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from smoe.bounds import DEFAULT_PREFETCH_DEPTH
from smoe.compute.experts import Experts
from smoe.compute.host_experts import Balancer, HostExperts
from smoe.compute.unit import ComputeUnit
from smoe.config import EngineConfig
from smoe.errors import BudgetError, ConfigError, UnsupportedModelError
from smoe.expert import EXACT
from smoe.fastpath.attention import listen_to
from smoe.fastpath.rows_of_pass import RowsOfPass
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from smoe.load.activations import activations_of
from smoe.load.calibration import calibrate
from smoe.load.choose_kernel import ChosenArithmetic, choose_arithmetic, is_native
from smoe.load.clustered import ClusterInputs, cluster_of
from smoe.load.experts_math import experts_math
from smoe.load.known import ResolvedSettings
from smoe.load.learned import LearnedValues
from smoe.load.predictor_name import predictor_name
from smoe.load.selftest import Prover, proven_sums
from smoe.load.tiers import Tiers, make_tiers
from smoe.machine.processor import reading_threads
from smoe.memory.arena import Arena
from smoe.memory.emulation import Emulation
from smoe.memory.link import Link
from smoe.memory.pacing import Pacing
from smoe.memory.quantised_store import QuantisedStore
from smoe.memory.reading_threads import Transfers
from smoe.memory.store import ExpertStore, StoredLayer
from smoe.models.rotary_lengths import RotaryLengths
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
from smoe.runtime.engine import Engine, fresh_eviction
from smoe.runtime.execute import LayerExecutor
from smoe.runtime.layer import LayerCompute
from smoe.runtime.offloaded_model import OffloadedModel
from smoe.runtime.paced import PacedCompute, PacedExecutor
from smoe.runtime.passes import Passes
from smoe.runtime.reserve import Reserve
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
        host = _host_experts(model, spec, config, store, tiers, arena.device, pacing)
        units: dict[int, ComputeUnit] = {} if host is None else {HOST: host}
        if host is not None:
            made.callback(host.close)
        if host is not None and is_native(spec, config, arena.device) and not pacing.is_emulated:
            # an emulated device is timed with torch's products (docs/log/device.md)
            host.multiply_by(SpinningPool(_host_threads(pacing), in_own_order=not is_supported()))
        arithmetic = _proven_arithmetic(model, spec, config, stores, checkpoint, table, transfers, arena, made)
        experts, rate = arithmetic.experts, LoadRate(transfers, tiers.link)
        transfers.reset()  # the proofs' loads do not count
        eviction = config.eviction_settings._replace(next_use=budget.learned.next_use)
        arrivals = Arrivals(
            stores=stores,
            table=table,
            eviction=fresh_eviction(eviction, ledger, store),
            transfers=transfers,
            arena=arena,
            math=experts.maths,
            clock=pacing.now,
        )
        balancer = _balancer(config, tiers, host, pacing, ledger.demand.slot_bytes)
        others = _others(model, spec, config, budget, arrivals, experts.arithmetic, units, checkpoint, rate, made)
        compute = (PacedCompute if pacing.has_times_of_its_own else LayerCompute)(
            experts, arrivals, arena.device, units if others is None else others.units, pacing, others
        )
        executor = (PacedExecutor if pacing.has_times_of_its_own else LayerExecutor)(
            compute=compute,
            predictors=predictors,
            substitution=substitution_of(config),
            answerer=_answerer(config, budget.known.prices, stores, rate, balancer),
            balancer=others or balancer,
            trial=Trial() if _is_on_trial(config) else None,
            upgrades=config.upgrade,
        )
        reserve = Reserve(
            ledger,
            executor,
            arena,
            spec.config,
            spec.context_tokens,
            config.max_sequences,
            spec.anatomy.kv_bytes_per_token,
        )
        rows = RowsOfPass(experts.spinning_pool, isinstance(store, QuantisedStore), config.reproducible)
        passes = Passes(
            executor,
            store,
            rules,
            reserve,
            rows if listen_to(rows, model) else None,
            arithmetic.leaves_little,
            arithmetic.leaves_little_of_prompts,
            config.turn_timeout_seconds,
        )
        engine = Engine(
            config=config,
            anatomy=spec.anatomy,
            ledger=ledger,
            store=store,
            arena=arena,
            transfers=transfers,
            passes=passes,
            reserve=reserve,
            rotary=RotaryLengths(model),
            budget_reason=budget.reason,
            reasons=budget.known.reasons,
            eviction=eviction,
            dense_bytes=_dense_bytes(model, ledger),
            context_tokens=spec.context_tokens,
        )
        _put_behind(model, spec, engine, predictors, others)
        if arithmetic.token_pass is not None and _fits_whole(config, ledger, pacing):
            pass_resident_experts(arithmetic.token_pass, engine)
        _start(model, engine, tiers.link, pacing)
        made.pop_all()  # the engine closes them from here on
    return cast(OffloadedModel, model)  # the object keeps transformers' class


def _start(model: PreTrainedModel, engine: Engine, link: Link | None, pacing: Pacing) -> None:
    """Calibrate an emulated device, where all misses are loaded, and load experts into free slots."""
    executor = engine.executor
    if isinstance(pacing, Emulation) and link is not None and engine.config.dilation is None:
        with executor.exactly():
            calibrate(model, pacing, link)
        executor.reset(engine.fresh_eviction())
    if _is_preloaded(engine.config, engine.ledger, pacing):
        executor.arrivals.preload()


def _is_preloaded(config: EngineConfig, ledger: Ledger, pacing: Pacing) -> bool:
    return _fits_whole(config, ledger, pacing) if config.preload is None else config.preload


def _fits_whole(config: EngineConfig, ledger: Ledger, pacing: Pacing) -> bool:
    """Return whether all experts stay in memory once they are loaded."""
    return ledger.cache_slots >= ledger.demand.total_experts and not pacing.is_emulated and config.keeps_experts


def _proven_arithmetic(
    model: PreTrainedModel,
    spec: ModelSpec,
    config: EngineConfig,
    stores: Mapping[int, ExpertStore],
    checkpoint: Mapping[int, Mapping[int, StoredLayer]],
    table: SlotTable,
    transfers: Transfers,
    arena: Arena,
    made: ExitStack,
) -> ChosenArithmetic:
    """Compare experts of every distinct layout and format, as the engine computes them, with transformers' own; then
    choose the kernels by others that are loaded for it. The slots are empty afterwards."""
    activations = activations_of(config, spec.dtype.torch, arena.device)
    maths = {
        (layer, form): math
        for form, of in stores.items()
        for layer, math in experts_math(model, spec, of, activations).items()
    }
    arrivals = Arrivals(
        stores=stores, table=table, eviction=LRU(), transfers=transfers, arena=arena, math=maths, clock=perf_counter
    )
    prover = Prover(arrivals, arena.device)
    try:
        experts = proven_sums(spec.sites, model, checkpoint, prover, Experts(maths), spec.dtype.torch)
        return choose_arithmetic(model, spec, config, prover, experts, made)
    finally:
        arrivals.recover()
        arrivals.forget()
        table.clear()


def _others(
    model: PreTrainedModel,
    spec: ModelSpec,
    config: EngineConfig,
    budget: Budget,
    arrivals: Arrivals,
    arithmetic: str,
    units: Mapping[int, ComputeUnit],
    checkpoint: Mapping[int, Mapping[int, StoredLayer]],
    rate: LoadRate,
    made: ExitStack,
) -> Cluster | None:
    """Return the cluster, or None if none is configured; `made` closes what is opened for it."""
    if config.cluster is None:
        return None
    demand = budget.ledger.demand
    asked = ClusterInputs(budget.weights, rate.seconds_per_byte, demand, budget.files, checkpoint[EXACT], budget.draft)
    return cluster_of(model, spec, config, arrivals, arithmetic, units, asked, made)


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
    rate: LoadRate,
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

    return Answerer(make, slot_bytes, rate, balancer)


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
