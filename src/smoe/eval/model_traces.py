"""Opens recorded traces of the model that is tuned."""

from __future__ import annotations

from pathlib import Path

from smoe.errors import ConfigError
from smoe.models.spec import ModelSpec
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
