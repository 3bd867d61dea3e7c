"""Opens recorded traces of the model that is tuned, and finds the size of the cache for which it is tuned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.load.device import choose_device
from smoe.load.ledger import make_ledger
from smoe.models.spec import ModelSpec
from smoe.policy.budget import Ledger
from smoe.routing import Phase, Routing
from smoe.trace.file import Trace


def trace_of(path: Path, spec: ModelSpec) -> Trace:
    """Return the trace in a file. Raise `ConfigError` if it was recorded with another model than the one with this
    `spec`, and `TraceError` if the file is not a trace."""
    trace = Trace(path)
    recorded = {layer.layer: layer.experts for layer in trace.header.layers}
    if recorded != {site.layer: site.experts for site in spec.sites}:
        raise another_model_s(path, trace, "cache")
    return trace


def another_model_s(path: Path, trace: Trace, setting: str) -> ConfigError:
    """Return the error for a trace whose layers or experts are not the model's. `setting`: the name of the argument
    that contains the trace's path."""
    return ConfigError(
        f"{path} was recorded with {trace.header.model}, whose layers and experts differ from this model's; record a "
        "trace of this model with smoe record",
        setting=setting,
        given=str(path),
        allowed="traces of the model that is tuned",
    )


def decode_steps(traces: Sequence[Sequence[Routing]], spec: ModelSpec) -> int:
    """Return the number of decode steps in all traces."""
    return sum(routing.phase is Phase.DECODE for trace in traces for routing in trace) // len(spec.sites)


def ledger_of_cache(spec: ModelSpec, config: EngineConfig) -> Ledger:
    """Return the ledger that an engine with this configuration would have. Raise `ConfigError` if every expert fits."""
    ledger, _ = make_ledger(spec, config, choose_device(config))
    if ledger.holds_all:
        raise ConfigError(
            f"all {ledger.cache_slots} experts fit in memory, so no expert is ever evicted; give less `memory`, or a "
            "share such as `resident_share=0.4`",
            setting="resident_share",
            allowed="less than all experts",
        )
    return ledger
