"""Loads a model from a name and settings, in four steps. Each begins when the previous one is complete.

    module            makes         which contains
    resolve.py        Resolved      the model's files, its structure, and where its experts are stored
    divide.py         Divided       the memory budget, and the final settings
    engine_parts.py   EngineParts   slots, memory tiers, reading threads, and tested kernels
    build.py          Engine        what computes steps with these parts; it is connected to the model

In this order, an error is found before anything large is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.expert import EXACT, LOW
from smoe.load.build import assemble
from smoe.load.divide import Divided, divide
from smoe.load.draft_model import PlannedDraft, following, is_apart
from smoe.load.ledger import shortages_of
from smoe.load.open_draft import draft_on_thread
from smoe.load.resolve import Resolved, resolve
from smoe.load.verified_packs import verify_pack
from smoe.machine.native_heap import give_back_heap
from smoe.machine.process_memory import note_start
from smoe.memory.arena import Arena, forget_peak
from smoe.memory.emulation import Emulation
from smoe.memory.pacing import Pacing
from smoe.memory.store import StoredLayer
from smoe.models.checkpoint import Checkpoint
from smoe.models.dense import count_whole
from smoe.models.load_observer import LoadObserver, OnBytes
from smoe.models.spec import LibrarySpec, ModelSpec
from smoe.presets import configure
from smoe.runtime.lifetime import collect_dropped
from smoe.runtime.offloaded_model import OffloadedModel
from smoe.runtime.running_ahead import DraftRouting
from smoe.units import parse_bytes, parse_share


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

    Returns the ordinary transformers model; its attribute `offload` is the `Engine`. `memory` is the budget ("8GiB" or
    bytes; None: free memory less a margin). With `count` "process", `memory` is the limit of this whole process.
    `resident` ("40%" or 0.4) sets the budget by another measure: the fraction of the routed experts that it can hold.
    `switches` are fields of `EngineConfig` and override those of `preset`; `dtype` and `device` may be torch objects.

    Raises `ConfigError` for invalid settings, `BudgetError` (with the ledger) for a budget that is too small, and
    `ModelError` or a subclass for models that smoe cannot compute exactly.
    """
    for short, name, given in (
        ("memory", "memory_bytes", memory),
        ("resident", "resident_share", resident),
        ("host_memory", "host_memory_bytes", host_memory),
    ):
        if given is not None and switches.get(name) is not None:
            raise ConfigError(
                f"`{short}={given}` and `{name}={switches[name]}` give the same setting twice; leave out one of them",
                setting=name,
                given=switches[name],
                allowed=f"only without `{short}`",
            )
    if resident is not None:
        switches["resident_share"] = parse_share(resident, "resident") if isinstance(resident, str) else resident
    switches["count"] = count
    sizes = {"memory": memory, "host_memory": host_memory}
    switches |= {f"{name}_bytes": parse_bytes(size, name) for name, size in sizes.items() if size is not None}
    torch_s_own = {name: given for name, given in switches.items() if isinstance(given, (torch.dtype, torch.device))}
    switches |= {name: str(given).removeprefix("torch.") for name, given in torch_s_own.items()}
    return load(model, configure(preset, **switches), revision)


def load(
    model: str | Path,
    config: EngineConfig,
    revision: str | None = None,
    observer: LoadObserver | None = None,
) -> OffloadedModel:
    """Load a model as `from_pretrained` does, with the settings `config`. The methods of `observer` are called as
    loading proceeds."""
    seen = observer or LoadObserver()
    collect_dropped()
    resolved = resolve(model, config, revision)
    seen.examined()
    note_start()
    divided = divide(resolved)
    for sentence in shortages_of(divided.config, divided.ledger, resolved.device):
        seen.short_of_memory(sentence)
    _verify_packs(resolved.checkpoint, resolved.spec, resolved.stored, seen.pack_bytes)
    seen.divided(divided.ledger)
    served = _open(resolved, divided, seen)
    give_back_heap()  # memory that only loading needed
    return served


def _open(resolved: Resolved, divided: Divided, observer: LoadObserver) -> OffloadedModel:
    """Reserve the slots, load the non-expert weights, and connect an engine to the model."""
    ledger, device = divided.ledger, resolved.device
    forget_peak(device)
    arena = Arena(ledger.sizes, device, huge_pages=divided.config.direct_io == "on")
    try:
        loaded = resolved.checkpoint.load_dense(divided.spec, device, observer.weight_bytes)
        count_whole(loaded, divided.spec.shell)
        draft = _draft_routing(divided.draft, loaded, divided.spec, divided.config)
        return assemble(loaded, arena, _pacing(resolved, divided), resolved, divided, draft, observer.host_tier)
    except BaseException:
        arena.close()
        raise


def _verify_packs(
    checkpoint: Checkpoint,
    spec: LibrarySpec,
    by_form: Mapping[int, Mapping[int, StoredLayer]],
    on_pack_bytes: OnBytes,
) -> None:
    """Compare the packed files of full and low-precision experts with their checksums, unless this machine has done so
    before."""
    for form, of in ((EXACT, spec), (LOW, spec.low)):
        if of is not None:
            verify_pack(checkpoint, of, by_form[form], on_pack_bytes)


def _draft_routing(
    draft: PlannedDraft | None, loaded: PreTrainedModel, spec: ModelSpec, config: EngineConfig
) -> DraftRouting | None:
    """Return the predictor that follows the draft model, which runs on a machine of the cluster or on a thread of this
    process. Return None without a draft model."""
    if is_apart(config):
        return DraftRouting(following(spec, config))
    return None if draft is None else draft_on_thread(draft, loaded)


def _pacing(resolved: Resolved, divided: Divided) -> Pacing:
    """Return the clock of this machine, or the slowed-down clock of the device to emulate."""
    if resolved.profile is None:
        return Pacing()
    config, layer_bytes = divided.config, divided.ledger.demand.weights_bytes / len(divided.spec.sites)
    nbytes = resolved.stores[EXACT].expert_bytes
    return Emulation(resolved.profile, config.dilation, layer_bytes, nbytes, config.emulated_expert_bytes)
