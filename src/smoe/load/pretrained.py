"""Load a model from a name and settings, in four values, each finished before the next begins.

    resolve.py   Resolved   the model's files, structure and the places of its experts
    divide.py    Divided    the memory budget, and the settings as they stay
    parts.py     Parts      slots, tiers and reading threads; kernels that are proven
    build.py     Engine     what computes steps with these, connected to the model

So what cannot work is refused before anything large is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.config import EngineConfig
from smoe.expert import EXACT, LOW
from smoe.load.build import assemble
from smoe.load.divide import Divided, divide
from smoe.load.draft_model import PlannedDraft, following, is_apart
from smoe.load.ledger import shortages_of
from smoe.load.open_draft import draft_on_thread
from smoe.load.resolve import Resolved, resolve
from smoe.load.verified_packs import OnBytes, verify_pack
from smoe.machine.native_heap import give_back_heap
from smoe.machine.process_memory import note_start
from smoe.memory.arena import Arena, forget_peak
from smoe.memory.emulation import Emulation
from smoe.memory.pacing import Pacing
from smoe.memory.store import StoredLayer
from smoe.models.checkpoint import Checkpoint
from smoe.models.parameter_count import count_whole
from smoe.models.spec import LibrarySpec, ModelSpec
from smoe.policy.budget import Ledger
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
    resolved = resolve(model, config, revision)
    divided = divide(resolved)
    for sentence in shortages_of(divided.config, divided.ledger, resolved.device):
        on_shortage(sentence)
    _verify_packs(resolved.checkpoint, resolved.spec, resolved.stored, on_pack_bytes)
    if on_ledger is not None:
        on_ledger(divided.ledger)
    served = _open(resolved, divided, on_host_tier)
    give_back_heap()  # memory that only loading needed
    return served


def _open(resolved: Resolved, divided: Divided, on_host_tier: Callable[[int], None] | None) -> OffloadedModel:
    """Allocate the slots, load the weights that are not experts, and put an engine behind the model."""
    ledger, device = divided.ledger, resolved.device
    forget_peak(device)
    arena = Arena(ledger.sizes, device, huge_pages=divided.config.direct_io == "on")
    try:
        arena.touch(slots=ledger.slots_in_use)  # allocation is slower than the disk, and other weights load meanwhile
        loaded = resolved.checkpoint.load_dense(divided.spec, device)
        count_whole(loaded, divided.spec.shell)
        arena.wait_touched(_TOUCH_SECONDS)
        draft = _draft_routing(divided.draft, loaded, divided.spec, divided.config)
        return assemble(loaded, arena, _pacing(resolved, divided), resolved, divided, draft, on_host_tier)
    except BaseException:
        arena.close()
        raise


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
    return None if draft is None else draft_on_thread(draft, loaded)


def _pacing(resolved: Resolved, divided: Divided) -> Pacing:
    """Return the clock of this machine, or of the device to emulate."""
    if resolved.profile is None:
        return Pacing()
    config, layer_bytes = divided.config, divided.ledger.demand.weights_bytes / len(divided.spec.sites)
    nbytes = resolved.stores[EXACT].expert_bytes
    return Emulation(resolved.profile, config.dilation, layer_bytes, nbytes, config.emulated_expert_bytes)
