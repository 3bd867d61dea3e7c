"""Builds an engine from its parts and connects it to the model: the last step of loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from transformers import PreTrainedModel

from smoe.compute.host_experts import Balancer
from smoe.compute.unit import ComputeUnit, Sharer
from smoe.config import EngineConfig
from smoe.errors import BudgetError, ConfigError
from smoe.expert import EXACT
from smoe.fastpath import token_pass
from smoe.fastpath.attention import listen_to
from smoe.fastpath.rows_of_pass import RowsOfPass
from smoe.load.calibration import calibrate
from smoe.load.clustered import ClusterInputs, cluster_of
from smoe.load.divide import Divided
from smoe.load.engine_parts import EngineParts, Tiers, balance_of, open_parts
from smoe.load.resolve import Resolved
from smoe.memory.arena import Arena
from smoe.memory.emulation import Emulation
from smoe.memory.link import Link
from smoe.memory.pacing import Pacing
from smoe.memory.quantised_store import QuantisedStore
from smoe.memory.store import ExpertStore
from smoe.models.finish_spec import position_limit
from smoe.models.rotary import RotaryLengths
from smoe.models.spec import ModelSpec
from smoe.models.weight_samples import checksum
from smoe.policy.answering import Answering
from smoe.policy.budget import Ledger
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.load_or_compute import Costs
from smoe.policy.plan import HOST
from smoe.policy.prediction import Listener, Predictor
from smoe.policy.prices import PriceTable
from smoe.policy.quality_budget import QualityBudget, TimeBudget, nats_of_perplexity
from smoe.policy.trial import Trial
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
from smoe.runtime.resident import resident_experts
from smoe.runtime.running_ahead import DraftRouting
from smoe.runtime.seam import attach
from smoe.runtime.substitution import substitution_of

if TYPE_CHECKING:
    from smoe.cluster.remote import Cluster


def assemble(
    model: PreTrainedModel,
    arena: Arena,
    pacing: Pacing,
    resolved: Resolved,
    divided: Divided,
    draft: DraftRouting | None = None,
    on_host_tier: Callable[[int], None] | None = None,
) -> OffloadedModel:
    """Build an engine, connect it to `model`, which was built without experts, and return the same model object. Raises
    the errors of `open_parts`."""
    with ExitStack() as made:  # closed in reverse order if a later step fails
        parts = open_parts(model, arena, pacing, draft, resolved, divided, made, on_host_tier)
        _build(resolved, divided, parts, made)
        made.pop_all()  # the engine closes them from here on
    return cast(OffloadedModel, model)  # the object keeps transformers' class


def _build(resolved: Resolved, divided: Divided, parts: EngineParts, made: ExitStack) -> None:
    """Build the engine from `parts` and connect it to the model."""
    config, store, pacing = divided.config, resolved.stores[EXACT], parts.pacing
    rate = LoadRate(parts.transfers, parts.tiers.link)
    parts.transfers.reset()  # the proofs' loads do not count
    arrivals = Arrivals(
        stores=resolved.stores,
        table=parts.table,
        eviction=fresh_eviction(_eviction(divided), divided.ledger, store),
        transfers=parts.transfers,
        arena=parts.arena,
        math=parts.arithmetic.experts.maths,
        clock=pacing.now,
    )
    balancer = _balancer(config, parts.tiers, parts.host, pacing, divided.ledger.demand.slot_bytes)
    others = _others(resolved, divided, parts, arrivals, rate, made)
    answerer = _answerer(config, divided.prices, resolved.stores, rate, balancer)
    executor = _executor(divided, parts, arrivals, answerer, balancer, others)
    engine = _engine(resolved, divided, parts, executor)
    _speed_up_tokens(parts, engine)
    parts.proofs.store()
    _put_behind(parts.model, divided.spec, engine, parts.predictors, others)
    _start(parts.model, engine, parts.tiers.link, pacing)


def _executor(
    divided: Divided,
    parts: EngineParts,
    arrivals: Arrivals,
    answerer: Answerer | None,
    balancer: Sharer | None,
    others: Cluster | None,
) -> LayerExecutor:
    """Return the executor of steps. It works in real time, or in the times of an emulated device."""
    config, pacing = divided.config, parts.pacing
    kinds = (PacedCompute, PacedExecutor) if pacing.has_times_of_its_own else (LayerCompute, LayerExecutor)
    units = _units(parts) if others is None else others.units
    compute = kinds[0](parts.arithmetic.experts, arrivals, parts.arena.device, units, pacing, others)
    return kinds[1](
        compute=compute,
        predictors=parts.predictors,
        substitution=substitution_of(config),
        answerer=answerer,
        balancer=others or balancer,
        trial=Trial() if _is_on_trial(config) else None,
        upgrades=config.upgrade,
    )


def _engine(resolved: Resolved, divided: Divided, parts: EngineParts, executor: LayerExecutor) -> Engine:
    """Return the engine made of the loaded `parts` (slots, threads, predictors) and the executor of steps."""
    config, spec, ledger, store = divided.config, divided.spec, divided.ledger, resolved.stores[EXACT]
    position_bytes = spec.anatomy.kv_bytes_per_token
    reserve = Reserve(
        ledger, executor, parts.arena, spec.config, spec.context_tokens, config.max_sequences, position_bytes
    )
    arithmetic = parts.arithmetic
    rows = RowsOfPass(arithmetic.experts.spinning_pool, isinstance(store, QuantisedStore), config.reproducible)
    passes = Passes(
        executor,
        store,
        parts.rules,
        reserve,
        rows if listen_to(rows, parts.model) else None,
        arithmetic.leaves_little,
        arithmetic.leaves_little_of_prompts,
        config.turn_timeout_seconds,
    )
    return Engine(
        config=config,
        anatomy=spec.anatomy,
        ledger=ledger,
        store=store,
        arena=parts.arena,
        transfers=parts.transfers,
        filler=parts.tiers.filler,
        passes=passes,
        reserve=reserve,
        rotary=RotaryLengths(parts.model),
        budget_reason=divided.budget_reason,
        reasons=divided.reasons,
        eviction=_eviction(divided),
        dense_bytes=_dense_bytes(parts.model, ledger),
        context_tokens=spec.context_tokens,
        position_limit=position_limit(spec.config),
        self_test="now" if parts.proofs.verdicts.made or not parts.proofs.verdicts.all else "earlier",
    )


def _eviction(divided: Divided) -> EvictionSettings:
    settings, learned = divided.config.eviction_settings, divided.learned.eviction
    return settings if learned is None else replace(settings, next_use=learned.next_use)


def _units(parts: EngineParts) -> dict[int, ComputeUnit]:
    """Return the compute units of this machine that compute experts in parallel with the device, by their number in
    plans (`Serve.unit`)."""
    return {} if parts.host is None else {HOST: parts.host}


def _others(
    resolved: Resolved, divided: Divided, parts: EngineParts, arrivals: Arrivals, rate: LoadRate, made: ExitStack
) -> Cluster | None:
    """Return the cluster of workers that the settings name, or None. `made` closes the cluster's resources if a later
    step fails."""
    config, spec = divided.config, divided.spec
    if config.cluster is None:
        return None
    asked = ClusterInputs(
        checksum(resolved.checkpoint.place),
        rate.seconds_per_byte,
        divided.ledger.demand,
        resolved.stored[EXACT],
        parts.draft,
    )
    arithmetic = parts.arithmetic.experts.arithmetic
    return cluster_of(parts.model, spec, config, arrivals, arithmetic, _units(parts), asked, made)


def _speed_up_tokens(parts: EngineParts, engine: Engine) -> None:
    """Make our kernels compute single tokens through the whole model, if they can. If all experts fit into the slots,
    the tokens of one text need no plans."""
    layers, residents = parts.arithmetic.layers, None
    if _fits_whole(engine.config, engine.ledger, parts.pacing):
        residents = resident_experts(engine, list(layers.values()))
    if residents is not None:
        for layer in layers.values():
            layer.compute_residents_by(partial(residents.of_prompt, layer.index))
    resident_layers = token_pass.none_resident if residents is None else residents.layers
    token_pass.speed_up(parts.model, layers, resident_layers, parts.proofs.verdicts)


def _put_behind(
    model: PreTrainedModel,
    spec: ModelSpec,
    engine: Engine,
    predictors: Mapping[Phase, Predictor],
    others: Listener | None,
) -> None:
    """Connect the model's MoE blocks and routers to the engine, and the predictors to the model. Predictors also report
    to the workers `others`."""
    attach(model, spec.sites, engine, {layer: spec.anatomy.routers[layer] for layer in engine.rules})
    for predictor in set(predictors.values()):
        predictor.install()
        if others is not None:
            predictor.speak_to(others)


def _start(model: PreTrainedModel, engine: Engine, link: Link | None, pacing: Pacing) -> None:
    """Calibrate an emulated device, during which all misses are loaded. Then load experts into free slots if the
    settings say so."""
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
    """Return whether the slots can hold all experts, so that every expert stays in memory once it has been loaded."""
    return ledger.holds_all and not pacing.is_emulated and config.keeps_experts


def _is_on_trial(config: EngineConfig) -> bool:
    return config.prefetch == "auto" if config.prefetch_trial is None else config.prefetch_trial


def _answerer(
    config: EngineConfig,
    prices: PriceTable | None,
    stores: Mapping[int, ExpertStore],
    rate: LoadRate,
    balancer: Balancer | None,
) -> Answerer | None:
    """Return the resolver of misses in decode, which stays within a limit of perplexity or of time. None if no limit is
    set."""
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
    """Return the object that decides which missing experts are copied to the device and which ones the CPU computes.
    None if the CPU computes no experts."""
    if host is None:
        return None
    assert tiers.link is not None, "where there is a host tier there is a link"
    method, fixed = balance_of(config, tiers), None
    by_measured_times = config.reproducible and config.alpha > 0 and not pacing.is_emulated
    if by_measured_times and method != "host":
        raise ConfigError(
            f"with `reproducible` and an alpha above 0, `balance={method}` would decide by measured times, which "
            "differ from run to run; use `balance=none` or `balance=host`",
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
    """Return the bytes that transformers has allocated for non-expert weights. Raise `BudgetError` if they exceed the
    ledger's entry for weights."""
    tensors = [*model.parameters(), *model.buffers()]
    used: int = sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())  # tied weights count once
    promised = ledger.dense_bytes
    if used > promised:
        raise BudgetError(
            f"the non-expert weights take {used} bytes, and the memory budget reserved {promised} bytes for them; "
            "this is a bug in smoe, please report it with the name of the model"
        )
    return used
