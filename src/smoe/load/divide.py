"""Divides the memory budget, and decides every setting that depends on it: the second step of loading.

Settings that the user left out get values that were measured for the model (`tuned_settings.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.expert import EXACT
from smoe.load.draft_model import PlannedDraft, planned_draft
from smoe.load.host_slots import reads_directly
from smoe.load.learned import LearnedValues
from smoe.load.ledger import make_ledger, resident_share_with
from smoe.load.resolve import Resolved
from smoe.load.tuned_settings import known_of, with_winners
from smoe.machine.available_memory import free_device_bytes
from smoe.memory.store import ExpertStore
from smoe.models.spec import LibrarySpec
from smoe.policy.budget import Ledger
from smoe.policy.prices import PriceTable


class Divided(NamedTuple):
    """The division of the memory budget into entries with their bytes, and the final settings."""

    ledger: Ledger
    budget_reason: str
    """The origin of the budget's size, as a text for users."""
    config: EngineConfig
    spec: LibrarySpec
    reasons: Mapping[str, str] = {}
    """The origin of each setting that the user left out, by its name."""
    prices: PriceTable | None = None
    """The quality costs of miss resolutions, if misses have a budget; else None."""
    learned: LearnedValues = LearnedValues()
    draft: PlannedDraft | None = None
    """The draft model on this machine, or None."""


def divide(resolved: Resolved) -> Divided:
    """Divide the memory budget among the model's needs, and return the division with the final settings. Raises
    `BudgetError` if the budget is too small, and `ConfigError` if a setting needs measured values that do not exist."""
    _, spec, config, device, _, stores, _, outside, fitted = resolved
    place, store = resolved.checkpoint.place, stores[EXACT]
    draft = planned_draft(resolved.checkpoint, spec, config, device)
    draft_bytes = 0 if draft is None else draft.nbytes
    share_of = resident_share_with(spec, config, device, store, draft_bytes, outside)
    won = with_winners(config, place, spec, device, share_of)
    ledger, reason = make_ledger(spec, won.config, device, store, won.learned.nbytes, draft_bytes, outside)
    known = known_of(won.config, place, ledger.resident_share)
    return Divided(
        ledger,
        reason,
        _settled_reads(known.config, stores.values(), ledger, device),
        replace(spec, embedding_on_disk=ledger.embedding_on_disk),
        {**fitted, **won.reasons, **known.reasons},
        known.prices,
        won.learned,
        draft,
    )


def _settled_reads(
    config: EngineConfig, stores: Iterable[ExpertStore], ledger: Ledger, device: torch.device
) -> EngineConfig:
    """Return the settings with the decision whether reads into slots bypass the page cache. Memory must not have been
    allocated yet."""
    if device.type != "cpu" or config.device == EMULATED:
        return config  # reads go to the host tier (`engine_parts.py`)
    spare = free_device_bytes(device)[0] - ledger.total_bytes
    is_direct = reads_directly(config, sum(store.total_bytes for store in stores), spare)
    return replace(config, direct_io="on" if is_direct else "off")
