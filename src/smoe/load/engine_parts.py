"""Makes the parts of an engine: memory tiers below its slots, reading threads, predictors and tested kernels. This is
the third step of loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.bounds import DEFAULT_PREFETCH_DEPTH
from smoe.compute.expert_math import ExpertMath
from smoe.compute.experts import Experts
from smoe.compute.host_experts import HostExperts
from smoe.compute.interleaved_slots import InterleavedSlots
from smoe.compute.quantised_math import QuantisedMath
from smoe.config import EngineConfig
from smoe.errors import ConfigError, UnsupportedModelError
from smoe.expert import EXACT
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from smoe.kernels.verdicts import Verdicts
from smoe.load.choose_kernel import ChosenArithmetic, choose_arithmetic, is_native
from smoe.load.divide import Divided
from smoe.load.experts_math import activations_of, experts_math
from smoe.load.host_slots import host_sizes, reads_directly, size_of
from smoe.load.learned import predictor_name
from smoe.load.resolve import Resolved
from smoe.load.selftest import Prover, proven_sums
from smoe.load.stored_proofs import StoredProofs, stored_proofs
from smoe.machine.available_memory import free_device_bytes, less_margin
from smoe.machine.processor import reading_threads, usable_cores
from smoe.memory.arena import Arena
from smoe.memory.emulation import Emulation
from smoe.memory.expert_files import DiskReader
from smoe.memory.host import HostTier
from smoe.memory.link import CudaLink, EmulatedLink, Link
from smoe.memory.movers import Arrange, Filler, HostMover, SlotMover
from smoe.memory.pacing import Pacing
from smoe.memory.page_lock import CudaRegistry
from smoe.memory.quantised_store import QuantisedStore
from smoe.memory.reading_threads import Mover, Transfers
from smoe.memory.store import ExpertStore
from smoe.memory.streams import CudaStreams
from smoe.models.scoring import ScoringRule, check_weighs_outputs, find_rule
from smoe.models.spec import ModelSpec
from smoe.policy.budget import SlotClass
from smoe.policy.eviction.lru import LRU
from smoe.policy.prediction import ASKED, Predictor
from smoe.policy.registry import predictor_kind
from smoe.policy.residency import SlotTable
from smoe.prediction.inputs import PredictorInputs
from smoe.routing import Phase
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.running_ahead import DraftRouting


class Tiers(NamedTuple):
    """The memory tiers below the device, and the mover that loads experts through them."""

    mover: Mover
    filler: Filler
    host: HostTier | None = None
    """The host tier; None if slots are in host memory themselves."""
    link: Link | None = None


INTERLEAVED_SHARE = 0.75
"""The minimum share of experts that must fit into the slots before rows are interleaved. Interleaving an expert takes
as much time as 4 to 20 products save, so an expert that is evicted sooner costs time."""


class EngineParts(NamedTuple):
    """The memory tiers, threads, predictors and tested kernels from which an engine is built. Its slots are empty."""

    model: PreTrainedModel
    """The model without experts."""
    arena: Arena
    table: SlotTable
    pacing: Pacing
    tiers: Tiers
    transfers: Transfers
    host: HostExperts | None
    """The compute unit that computes missing experts on the CPU of a machine with a device, or None."""
    arithmetic: ChosenArithmetic
    proofs: StoredProofs
    """The results of the proofs that `arithmetic` relies on."""
    rules: Mapping[int, ScoringRule]
    """By layer, the scoring rules of routers whose scores a policy reads."""
    predictors: Mapping[Phase, Predictor]
    draft: DraftRouting | None
    """The predictions of the draft model, if prefetching uses one."""


def open_parts(
    model: PreTrainedModel,
    arena: Arena,
    pacing: Pacing,
    draft: DraftRouting | None,
    resolved: Resolved,
    divided: Divided,
    made: ExitStack,
    on_host_tier: Callable[[int], None] | None,
) -> EngineParts:
    """Make the parts of an engine for `model`, which was built without experts. `made` closes them if a later step
    fails.

    `on_host_tier` is called with the bytes of host memory that are allocated and locked for a GPU, because this takes a
    while. Raises `UnsupportedModelError` if experts or a required scoring rule cannot be verified. Raises `ConfigError`
    for settings that this machine or model family does not support.
    """
    config, spec, ledger = divided.config, divided.spec, divided.ledger
    if config.alpha > 0 or config.prices_answers:
        check_weighs_outputs(model.get_submodule(spec.sites[0].name))
    rules = scoring_rules(model, spec) if config.needs_scores else {}
    predictors = _predictors(model, divided, rules, draft, arena.device)
    table = SlotTable(*ledger.pools)
    maths = _maths(model, resolved, divided, arena, pacing)
    is_interleaved = any(isinstance(math, QuantisedMath) and math.is_interleaved for math in maths.values())
    arrange = InterleavedSlots(maths) if is_interleaved else None
    cached_first = resolved.config.direct_io == "auto"  # with "on" the user requests direct reads in all cases
    classes = ledger.demand.all_classes
    tiers = make_tiers(resolved.stores, arena, table, classes, config, pacing, on_host_tier, arrange, cached_first)
    transfers = Transfers(tiers.mover, reading_threads(config), pacing.now)
    made.callback(transfers.close)
    host = _host_experts(model, resolved, divided, tiers, pacing)
    if host is not None:
        made.callback(host.close)
        if is_native(spec, config, arena.device) and not pacing.is_emulated:
            # an emulated device is timed with torch's products (docs/log/device.md)
            host.multiply_by(SpinningPool(_host_threads(pacing), in_own_order=not is_supported()))
    proofs = stored_proofs(model, resolved)
    arithmetic = _proven_arithmetic(model, resolved, divided, maths, table, transfers, arena, made, proofs.verdicts)
    return EngineParts(
        model, arena, table, pacing, tiers, transfers, host, arithmetic, proofs, rules, predictors, draft
    )


def balance_of(config: EngineConfig, tiers: Tiers) -> str:
    """Return the name of the method that divides missing experts between the CPU and loads to the device."""
    if config.balance == "auto":
        return "none" if tiers.host is None else "optimal"
    return config.balance


def _host_experts(
    model: PreTrainedModel, resolved: Resolved, divided: Divided, tiers: Tiers, pacing: Pacing
) -> HostExperts | None:
    """Return the compute unit that computes missing experts on the CPU of a machine with a device. Return None if the
    settings let the CPU compute none."""
    config, spec, store, device = divided.config, divided.spec, resolved.stores[EXACT], resolved.device
    if balance_of(config, tiers) == "none":
        return None
    assert tiers.host is not None, "refused before loading"
    math = experts_math(model, spec, store, activations_of(config, spec.dtype.torch, device))
    if device.type != "cpu" and not all(layer.is_movable for layer in math.values()):
        raise ConfigError(
            f"`balance={balance_of(config, tiers)}`: the experts of this family end in a norm whose weights only the "
            "device has, so the CPU cannot compute them; use `balance=none`",
            setting="balance",
            given=config.balance,
            allowed="none for this model",
        )
    return HostExperts(tiers.host, tiers.filler, store, math, _host_threads(pacing), pacing)


def _host_threads(pacing: Pacing) -> int:
    return 1 if pacing.is_emulated else torch.get_num_threads()


def _maths(
    model: PreTrainedModel, resolved: Resolved, divided: Divided, arena: Arena, pacing: Pacing
) -> dict[tuple[int, int], ExpertMath]:
    """Return the arithmetic of the experts in the arena's slots, by (layer, format), before kernels are chosen."""
    spec, config = divided.spec, divided.config
    activations = activations_of(config, spec.dtype.torch, arena.device)
    is_ours = is_native(spec, config, arena.device) and arena.device.type == "cpu" and not pacing.is_emulated
    # torch computes no quantized experts for one token; low copies of other experts it may
    is_sure = is_ours and isinstance(resolved.stores[EXACT], QuantisedStore)
    may_interleave = is_sure and divided.ledger.cache_slots >= INTERLEAVED_SHARE * divided.ledger.demand.total_experts
    return {
        (layer, form): math
        for form, store in resolved.stores.items()
        for layer, math in experts_math(model, spec, store, activations, may_interleave).items()
    }


def _proven_arithmetic(
    model: PreTrainedModel,
    resolved: Resolved,
    divided: Divided,
    maths: Mapping[tuple[int, int], ExpertMath],
    table: SlotTable,
    transfers: Transfers,
    arena: Arena,
    made: ExitStack,
    verdicts: Verdicts,
) -> ChosenArithmetic:
    """Compare experts with transformers' own, for every distinct layout and format, and then choose the kernels, unless
    the results of these proofs are among `verdicts`. Return the chosen arithmetic. The comparison loads experts into
    the slots; afterwards the slots are empty."""
    spec, config, stores = divided.spec, divided.config, resolved.stores
    arrivals = Arrivals(
        stores=stores, table=table, eviction=LRU(), transfers=transfers, arena=arena, math=maths, clock=perf_counter
    )
    prover = Prover(arrivals, arena.device)
    try:
        proven = proven_sums(spec.sites, model, resolved.stored, prover, Experts(maths), spec.dtype.torch, verdicts)
        return choose_arithmetic(model, spec, config, prover, proven, made, verdicts)
    finally:
        arrivals.recover()
        arrivals.forget()
        table.clear()


def _predictors(
    model: PreTrainedModel,
    divided: Divided,
    rules: Mapping[int, ScoringRule],
    draft: DraftRouting | None,
    device: torch.device,
) -> Mapping[Phase, Predictor]:
    """Return the predictor of each phase. The predictor for prefill is always the next layer's gate, because a prompt
    needs nearly all experts."""
    config, spec, learned = divided.config, divided.spec, divided.learned
    depth = config.prefetch_depth or DEFAULT_PREFETCH_DEPTH
    what = config.prefetch_what
    subject = PredictorInputs(model, spec, rules, what, depth, learned.prefetch, draft)
    found: dict[Phase, Predictor] = {Phase.PREFILL: subject.next_gate}
    decode = predictor_kind(predictor_name(spec, config, device)).make(subject)
    if decode is not None and config.prefetch_asked is not None:
        decode.ask_at(ASKED[config.prefetch_asked])
    return found if decode is None else found | {Phase.DECODE: decode}


def scoring_rules(model: PreTrainedModel, spec: ModelSpec) -> dict[int, ScoringRule]:
    """Return the scoring rule of every layer's router. Raise `UnsupportedModelError` if one of the rules cannot be
    verified."""
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


def make_tiers(
    stores: Mapping[int, ExpertStore],
    arena: Arena,
    table: SlotTable,
    classes: Sequence[SlotClass],
    config: EngineConfig,
    pacing: Pacing,
    on_host_tier: Callable[[int], None] | None,
    arrange: Arrange | None,
    cached_first: bool,
) -> Tiers:
    """Return the memory tiers: a host tier and a link for a device with its own memory; for a CPU, reads directly into
    slots, where `arrange` is called with each expert unless it is None.

    `stores` is by format; `classes` are the slot classes of the ledger, of all formats. `on_host_tier` is called with
    the bytes of host memory that will be allocated and locked for a GPU. `cached_first`: with direct reads, ranges that
    are in the page cache are copied from there.
    """
    free, _ = free_device_bytes(torch.device("cpu"))
    total_bytes = sum(store.total_bytes for store in stores.values())
    if arena.device.type == "cpu" and not pacing.is_emulated:
        is_direct = reads_directly(config, total_bytes, free - arena.nbytes)
        reader = DiskReader(is_direct, cached_first=cached_first)
        filler = Filler(stores, reader, arrange)
        return Tiers(SlotMover(filler, reader, arena), filler)
    budget = config.host_memory_bytes if config.host_memory_bytes is not None else less_margin(free)
    # two for each reading thread (a demand load within a prefetch), and one for the CPU
    least = 2 * reading_threads(config) + 1
    sizes = host_sizes(classes, budget, least)
    nbytes = sum(slots * each for slots, each in sizes)
    is_direct = reads_directly(config, total_bytes, free - nbytes)
    reader = DiskReader(is_direct, cached_first=cached_first)
    filler = Filler(stores, reader)
    registry = None if pacing.is_emulated else CudaRegistry(arena.device)
    if registry is not None and on_host_tier is not None:
        on_host_tier(nbytes)
    host = HostTier(sizes, size_of(classes), lambda key: key in table.ready, registry, is_direct, usable_cores())
    link: Link = EmulatedLink(pacing) if isinstance(pacing, Emulation) else CudaLink(CudaStreams(arena.device))
    return Tiers(HostMover(filler, reader, host, arena, link), filler, host, link)
