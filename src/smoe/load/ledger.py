"""Plans a model's slots on this machine: where its experts are stored, how much memory the model needs, and how the
memory budget is divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from smoe.bounds import EMULATED
from smoe.compute.experts_alone import LEAST_SLOTS
from smoe.config import EngineConfig
from smoe.errors import BudgetError, ConfigError
from smoe.kernels.isa import widest
from smoe.machine.available_memory import free_device_bytes, less_margin, shortage
from smoe.machine.device import AnyDevice
from smoe.machine.process_memory import outside_budget_bytes
from smoe.machine.processor import reading_threads
from smoe.memory.arena import GIVES_BACK
from smoe.memory.dtypes import BF16
from smoe.memory.quantised_store import QuantisedStore, is_quantised
from smoe.memory.store import ExpertStore, StoredLayer
from smoe.models.described import Described
from smoe.models.packed import contents_as_they_are
from smoe.models.spec import ModelSpec
from smoe.models.workspace import reserved_kernel_bytes
from smoe.policy.budget import (
    Demand,
    Ledger,
    allocate,
    budget_for_share,
    full_bytes,
    least_entries,
    less_to_ask,
    minimum_bytes,
)
from smoe.units import enough_to_type, format_bytes

LEAST_CONTEXT_TOKENS = 512
"""The smallest context length that is chosen automatically: enough for a text and an answer."""
WHOLE_FITS = "the whole model fits"
"""The reason for a budget's size if more memory would not be used."""
_Spec = TypeVar("_Spec", bound=ModelSpec)
_CUDA_ALIGNMENT = 256
"""The alignment of torch's allocator on a GPU, in bytes. At other addresses matrix kernels are slow, or their bits
differ."""


def open_store(
    checkpoint: Described, spec: ModelSpec, experts: Mapping[int, StoredLayer], device: AnyDevice
) -> ExpertStore:
    """Return the locations of the experts: in a packed file that stores them in the checkpoint's own precision if there
    is one, else in the checkpoint."""
    contents = contents_as_they_are(spec, experts)
    packed = None if contents is None else checkpoint.packed(contents)
    layers, dtype = experts if packed is None else packed.layers, spec.dtype.stored
    if is_quantised(layers):
        return QuantisedStore(layers, dtype)
    return ExpertStore(layers, dtype, _CUDA_ALIGNMENT if device.type == "cuda" else None)


def open_if_here(checkpoint: Described, spec: ModelSpec, device: AnyDevice) -> ExpertStore | None:
    """Return the locations of the experts if the weights are on disk, else None. Only headers are read, and nothing is
    downloaded.

    Also return None with a `precision`, because the sizes of its slots are known even before the packed file is
    written.
    """
    if spec.precision != "auto":
        return None
    if not checkpoint.has_weights():
        checkpoint.check_servable()
        return None
    return open_store(checkpoint, spec, checkpoint.experts(spec), device)


def fit_context(
    spec: _Spec, config: EngineConfig, demand: Callable[[_Spec], Demand], outside: Mapping[str, int]
) -> tuple[_Spec, EngineConfig, dict[str, str]]:
    """Return the spec and the settings, with a shorter context if the user configured none and the default length
    exceeds the budget.

    The context is halved until it fits, down to `LEAST_CONTEXT_TOKENS`. The third result is the reason for the change,
    by setting. `demand`: a function that returns the memory that a spec needs. `outside`: the bytes that a process
    needs outside the budget, by name.
    """
    usual = spec.context_tokens
    if config.context_tokens is not None or config.memory_bytes is None:
        return spec, config, {}
    room = config.memory_bytes
    if config.count == "process":
        room -= sum(outside.values())
    while minimum_bytes(demand(spec)) > room and spec.context_tokens > LEAST_CONTEXT_TOKENS:
        spec = replace(spec, context_tokens=max(LEAST_CONTEXT_TOKENS, spec.context_tokens // 2))
    if spec.context_tokens == usual:
        return spec, config, {}
    why = f"the budget cannot hold the usual {usual} tokens"
    return spec, replace(config, context_tokens=spec.context_tokens), {"context_tokens": why}


def make_ledger(
    spec: ModelSpec,
    config: EngineConfig,
    device: AnyDevice,
    store: ExpertStore | None = None,
    learned_bytes: int = 0,
    draft_bytes: int = 0,
    outside: Mapping[str, int] | None = None,
) -> tuple[Ledger, str]:
    """Return the division of the memory budget, and a text that says where the budget's size comes from. Raise
    `BudgetError` if the budget is too small.

    `learned_bytes`: the size of learned values; `draft_bytes`: the size of the draft model. `outside`: the bytes that
    the process needs outside the budget, by name; None: those of `outside_budget`.
    """
    demand = _settled(spec.demand(config), config, device) if store is None else demand_of(spec, config, device, store)
    demand = replace(demand, learned_bytes=learned_bytes, draft_bytes=draft_bytes)
    ledger, reason = _divided(config, device, demand, outside_budget(spec, config) if outside is None else outside)
    return with_lent_slots(ledger, config, device), reason


def with_lent_slots(ledger: Ledger, config: EngineConfig, device: AnyDevice) -> Ledger:
    """Return the ledger with spare slots if experts may use memory that is reserved for workspace and KV cache while it
    is not in use, otherwise the ledger itself.

    The operating system must support returning parts of memory, and no other setting may fix the number of experts.
    """
    is_plain = config.lend_reserve and config.expert_cache == "budget" and config.resident_share is None
    lends = is_plain and GIVES_BACK and device.type == "cpu" and config.device != EMULATED and not ledger.demand.low
    return ledger.lending() if lends else ledger


def _divided(config: EngineConfig, device: AnyDevice, demand: Demand, outside: Mapping[str, int]) -> tuple[Ledger, str]:
    if config.memory_bytes is not None and config.count == "process":
        return _in_process(config, config.memory_bytes, outside, device, demand)
    if config.memory_bytes is not None:
        return allocate(config.memory_bytes, demand), "as requested"
    if config.resident_share is not None:
        budget = budget_for_share(config.resident_share, demand)
        return allocate(budget, demand), f"for {100 * config.resident_share:.3g}% of the experts"
    free, source = free_device_bytes(device)
    budget = min(less_margin(free), full_bytes(demand))
    reason = WHOLE_FITS if _is_whole(config, budget == full_bytes(demand)) else f"{source} less a margin"
    return allocate(budget, demand), reason


def _in_process(
    config: EngineConfig, limit_bytes: int, outside: Mapping[str, int], device: AnyDevice, demand: Demand
) -> tuple[Ledger, str]:
    """Return the division of a memory budget that is chosen so that the whole process, with its memory outside the
    budget, takes at most `limit_bytes`. Also return a text that says where the budget's size comes from."""
    if device.type != "cpu":
        raise ConfigError(
            "`count=process` makes `memory` the limit of the whole process, which works only on a CPU, and this "
            f"model computes on {device}; use `device=cpu`, or give the memory of the device only, with `memory` and "
            "without `count`",
            setting="count",
            given="process",
            allowed="budget on this device",
        )
    room = limit_bytes - sum(outside.values())
    try:
        budget = max(0, min(room, full_bytes(demand)))
        ledger = allocate(budget, demand)
    except BudgetError as error:
        least = minimum_bytes(demand) + limit_bytes - room
        taken = "".join(f"\n  {name:<40}{format_bytes(count):>12}" for name, count in outside.items() if count)
        raise BudgetError(
            f"a process of {format_bytes(limit_bytes)} cannot hold this model. Outside the memory budget, the "
            f"process needs{taken}\nThis leaves {format_bytes(max(0, room))} for the memory budget; "
            f"{least_entries(demand)}\n"
            f"give the process {enough_to_type(least)} or more, with `count=process`{less_to_ask(demand)}",
            setting="memory_bytes",
            given=limit_bytes,
            allowed=f"at least {least} bytes",
        ) from error
    fits = f": {WHOLE_FITS}" if _is_whole(config, budget < room) else ""
    return ledger, f"of a process of {format_bytes(limit_bytes)}{fits}"


def _is_whole(config: EngineConfig, fits: bool) -> bool:
    """Return whether all experts stay in memory, if they fit."""
    return fits and config.keeps_experts and config.expert_cache == "budget"


def outside_budget(spec: ModelSpec, config: EngineConfig) -> dict[str, int]:
    """Return the largest memory in bytes that this process needs outside the budget, by a name for display, for a model
    on a CPU."""
    is_quantised = spec.stored_bytes is not None and bool(spec.dense) and spec.dtype is BF16
    by_own_kernels = is_quantised and config.kernels != "torch" and widest() is not None
    vocabulary = int(spec.config.get_text_config().vocab_size)
    return outside_budget_bytes(reserved_kernel_bytes(spec.experts_bytes), by_own_kernels, vocabulary)


def shortages_of(config: EngineConfig, ledger: Ledger, device: AnyDevice) -> list[str]:
    """Return messages about requested memory that is not free: one for the budget and one for a host tier, if they
    exceed the free memory."""
    host_bytes = config.host_memory_bytes or 0
    if device.type == "cpu":
        both = " and `host_memory`" if config.device == EMULATED and host_bytes else ""
        host_bytes = host_bytes if both else 0
        asked, used = ledger.budget_bytes + host_bytes, ledger.total_bytes + host_bytes
        found = [shortage(f"a budget{both}", asked, used_bytes=used)]
    else:
        of_device = shortage("a budget", ledger.budget_bytes, device, ledger.total_bytes)
        found = [of_device, shortage("`host_memory`", host_bytes)]
    return [each for each in found if each is not None]


def resident_share_with(
    spec: ModelSpec,
    config: EngineConfig,
    device: AnyDevice,
    store: ExpertStore | None,
    draft_bytes: int = 0,
    outside: Mapping[str, int] | None = None,
) -> Callable[[int], float]:
    """Return a function that takes the bytes of learned values and returns the resident share, the fraction of experts
    that stay in memory. The function raises `BudgetError`."""
    return lambda learned_bytes: (
        make_ledger(spec, config, device, store, learned_bytes, draft_bytes, outside)[0].resident_share
    )


def demand_of(spec: ModelSpec, config: EngineConfig, device: AnyDevice, store: ExpertStore) -> Demand:
    """Return the memory that a model needs from the budget, for a model whose files are on disk."""
    # A thread needs two buffers when a demand load passes during a prefetch; with a host tier they are host memory.
    has_host_tier = device.type != "cpu" or config.device == EMULATED
    buffers = 0 if has_host_tier else 2 * reading_threads(config) * store.staging_buffer_bytes
    # for experts that the coordinator computes itself when its workers fail
    if config.cluster is not None and not has_host_tier:
        buffers += LEAST_SLOTS * sum(set(store.slot_bytes.values())) + store.staging_buffer_bytes
    return _settled(spec.demand(config, store.slot_bytes, buffers), config, device)


def _settled(demand: Demand, config: EngineConfig, device: AnyDevice) -> Demand:
    """Return the demand for memory, adapted to the device. A device with its own memory needs the whole embedding,
    because single rows cannot be read from disk into its memory."""
    has_memory = device.type != "cpu" or config.device == EMULATED
    return replace(demand, embedding_bytes=0) if has_memory else demand
