"""The size of the cache for which an eviction policy is tuned."""

from __future__ import annotations

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.load.device import choose_device
from smoe.load.ledger import make_ledger
from smoe.models.spec import ModelSpec
from smoe.policy.budget import Ledger


def ledger_of_cache(spec: ModelSpec, config: EngineConfig) -> Ledger:
    """Return the ledger that an engine with this configuration would have. Raise `ConfigError` if every expert fits."""
    ledger, _ = make_ledger(spec, config, choose_device(config))
    if ledger.cache_slots >= ledger.demand.total_experts:
        raise ConfigError(
            f"all {ledger.cache_slots} experts fit in memory, so no expert is ever evicted; give less `memory`, or a "
            "share such as `resident_share=0.4`",
            setting="resident_share",
            allowed="less than all experts",
        )
    return ledger
