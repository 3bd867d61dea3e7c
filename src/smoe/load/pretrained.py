"""Load a model from a name and settings: structure, index, budget, slots and weights, in this order.

So what cannot work is refused before anything large is read. `assembly.py` builds the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.errors import UnpreparedError
from smoe.expert import EXACT, LOW
from smoe.load.assembly import Budget, assemble
from smoe.load.clustered import check_cluster
from smoe.load.device import choose_device
from smoe.load.draft_model import PlannedDraft, planned_draft
from smoe.load.draft_size import least_draft_bytes
from smoe.load.host_slots import reads_directly
from smoe.load.known import known_of
from smoe.load.ledger import (
    demand_of,
    fit_context,
    make_ledger,
    open_store,
    outside_budget,
    resident_share_with,
    shortages_of,
)
from smoe.load.remote_draft import following, is_apart, placed_draft
from smoe.load.verified_packs import OnBytes, verify_pack
from smoe.load.winners import with_winners
from smoe.load.worker_files import worker_files
from smoe.machine.available_memory import free_device_bytes
from smoe.machine.native_heap import give_back_heap
from smoe.machine.process_memory import note_start
from smoe.machine.processor import set_compute_threads
from smoe.memory.arena import Arena, forget_peak
from smoe.memory.emulation import DeviceProfile, Emulation, read_emulated
from smoe.memory.pacing import Pacing
from smoe.memory.store import ExpertStore, StoredLayer
from smoe.models.checkpoint import Checkpoint, local_checkpoint, whole_checkpoint
from smoe.models.parameter_count import count_whole
from smoe.models.read_spec import read_spec, spec_of_whole
from smoe.models.spec import LibrarySpec, ModelSpec
from smoe.models.weight_samples import checksum
from smoe.policy.budget import Ledger, allocate
from smoe.presets import configure
from smoe.runtime.lifetime import collect_dropped
from smoe.runtime.offloaded_model import OffloadedModel
from smoe.runtime.running_ahead import DraftRouting
from smoe.units import parse_bytes, parse_share

_log = logging.getLogger(__name__)
_TOUCH_SECONDS = 2.0
"""How long loading waits for the allocation of slots; the rest is allocated while the model runs."""


def from_pretrained(
    model: str | Path = "demo",
    *,
    memory: str | int | None = None,
    count: str = "budget",
    resident: str | float | None = None,
    host_memory: str | int | None = None,
    preset: str = "exact",
    revision: str | None = None,
    **switches: Any,
) -> OffloadedModel:
    """Load a Mixture-of-Experts model whose experts stay on disk until they are needed.

    Returns the ordinary transformers model; `model.offload` is its `Engine`. `memory` is the budget ("8GiB" or bytes;
    None: free memory less a margin). With `count` "process" it is the limit of this whole process. `resident` ("40%",
    0.4) instead requests the memory for that share of the routed experts. `switches` are fields of `EngineConfig`,
    which override those of `preset`; `dtype` and `device` may be torch objects.

    Raises `ConfigError` for bad settings, `BudgetError` (with the ledger) for a budget that cannot work, `ModelError`
    and its subclasses for models that cannot be served exactly.
    """
    if resident is not None:
        switches["resident_share"] = parse_share(resident, "resident_share") if isinstance(resident, str) else resident
    switches["count"] = count
    sizes = {"memory_bytes": memory, "host_memory_bytes": host_memory}
    switches |= {name: parse_bytes(size, name) for name, size in sizes.items() if size is not None}
    torch_s_own = {name: given for name, given in switches.items() if isinstance(given, (torch.dtype, torch.device))}
    switches |= {name: str(given).removeprefix("torch.") for name, given in torch_s_own.items()}
    return load(model, configure(preset, **switches), revision)


def load(
    model: str | Path,
    config: EngineConfig,
    revision: str | None = None,
    on_ledger: Callable[[Ledger], None] | None = None,
    on_host_tier: Callable[[int], None] | None = None,
    on_shortage: Callable[[str], None] = _log.warning,
    on_pack_bytes: OnBytes = lambda done, total: None,
) -> OffloadedModel:
    """Load a model as `from_pretrained`, from a finished configuration.

    `on_ledger` is called with the budget before anything large is read, `on_host_tier` with the bytes of host memory
    that will be locked for a GPU, `on_shortage` with a message if more memory is requested than free, and
    `on_pack_bytes` with the progress of comparing a pack with its checksums, once per machine.
    """
    collect_dropped()
    note_start()
    device = choose_device(config)
    profile = read_emulated(config.profile) if config.device == EMULATED else None
    if device.type == "cpu" and profile is None:
        _check_balance(config)
    set_compute_threads(config.threads)
    check_cluster(config)
    config = placed_draft(config)
    checkpoint, spec, by_form = _open_checkpoint(model, config, revision)
    stores = {form: open_store(checkpoint, spec, of, device) for form, of in by_form.items()}
    outside = outside_budget(spec, config)
    spec, config, fitted = fit_context(
        spec, config, lambda each: demand_of(each, config, device, stores[EXACT]), outside
    )
    draft = planned_draft(checkpoint, spec, config, device)
    draft_bytes = 0 if draft is None else draft.nbytes
    share_of = resident_share_with(spec, config, device, stores[EXACT], draft_bytes, outside)
    won = with_winners(config, checkpoint.place, spec, device, share_of)
    config, learned = won.config, won.learned
    ledger, reason = make_ledger(spec, config, device, stores[EXACT], learned.nbytes, draft_bytes, outside)
    for sentence in shortages_of(config, ledger, device):
        on_shortage(sentence)
    _verify_packs(checkpoint, spec, by_form, on_pack_bytes)
    if on_ledger is not None:
        on_ledger(ledger)
    known = known_of(config, checkpoint.place, ledger.resident_share)
    config = _settled_reads(known.config, stores.values(), ledger, device)
    spec = replace(spec, embedding_on_disk=ledger.embedding_on_disk)
    forget_peak(device)
    arena = Arena(ledger.sizes, device, huge_pages=config.direct_io == "on")
    try:
        arena.touch(slots=ledger.slots_in_use)  # allocation is slower than the disk, and other weights load meanwhile
        loaded = checkpoint.load_dense(spec, device)
        count_whole(loaded, spec.shell)
        arena.wait_touched(_TOUCH_SECONDS)
        pacing = Pacing() if profile is None else _emulation(profile, config, spec, ledger, stores[EXACT])
        known = known._replace(config=config, reasons=fitted | won.reasons | known.reasons)
        weights = "" if config.cluster is None else checksum(checkpoint.place)
        files = {} if config.cluster is None else worker_files(checkpoint, spec)
        ahead = _draft_routing(draft, loaded, spec, config)
        budget = Budget(ledger, reason, known, learned, weights, ahead, files)
        served = assemble(loaded, spec, config, budget, stores, arena, by_form, pacing, on_host_tier)
        give_back_heap()  # memory that only loading needed
        return served
    except BaseException:
        arena.close()
        raise


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


def _verify_packs(
    checkpoint: Checkpoint,
    spec: LibrarySpec,
    by_form: Mapping[int, Mapping[int, StoredLayer]],
    on_pack_bytes: OnBytes,
) -> None:
    """Compare the packs of both formats with their checksums, if they have any and were not compared here before."""
    for form, of in ((EXACT, spec), (LOW, spec.low)):
        if of is not None:
            verify_pack(checkpoint, of, by_form[form], on_pack_bytes)


def _draft_routing(
    draft: PlannedDraft | None, loaded: PreTrainedModel, spec: ModelSpec, config: EngineConfig
) -> DraftRouting | None:
    """Return the routing of the draft model, which runs in the cluster or on a thread here; None without one."""
    if is_apart(config):
        return DraftRouting(following(spec, config))
    return None if draft is None else draft.on_thread(loaded)


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


def _emulation(
    profile: DeviceProfile, config: EngineConfig, spec: ModelSpec, ledger: Ledger, store: ExpertStore
) -> Emulation:
    layer_bytes = ledger.demand.weights_bytes / len(spec.sites)
    return Emulation(profile, config.dilation, layer_bytes, store.expert_bytes, config.emulated_expert_bytes)


def _settled_reads(
    config: EngineConfig, stores: Iterable[ExpertStore], ledger: Ledger, device: torch.device
) -> EngineConfig:
    """Decide whether reads into slots bypass the page cache, before memory is allocated."""
    if device.type != "cpu" or config.device == EMULATED:
        return config  # reads go to the host tier (`tiers.py`)
    spare = free_device_bytes(device)[0] - ledger.budget_bytes
    is_direct = reads_directly(config, sum(store.total_bytes for store in stores), spare)
    return replace(config, direct_io="on" if is_direct else "off")
