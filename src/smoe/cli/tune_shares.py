"""`smoe tune --shares`: measures how important the chosen experts are, and finds thresholds for given shares of
them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smoe.cli.libraries import import_libraries, reading, token_ids
from smoe.cli.measured import Measured
from smoe.cli.options import EngineOptions
from smoe.cli.tune_options import TuneOptions
from smoe.config import SETTINGS
from smoe.errors import ConfigError

if TYPE_CHECKING:
    from smoe.load.importance_profile import ImportanceProfile

_TOKENS = 4000


def tune_shares(model: str, engine: EngineOptions, tuned: TuneOptions) -> Measured:
    """Profile a text or a recorded run, and find the thresholds of the shares."""
    shares, traces = tuned.shares or "", tuned.trace or []
    wanted = SETTINGS["precision_shares"].allowed.parse("precision_shares", shares)
    EngineOptions(low_precision="int4", precision_shares=shares).config()  # checks bounds before minutes of reading
    if len(traces) + (tuned.text is not None) > 1:
        message = "--text and --trace both give the data to profile; give one of them"
        raise ConfigError(message, setting="trace", given=str(traces[0]), allowed="one, and only without `text`")
    found = (_recorded if traces else _read)(model, engine, tuned)
    thresholds = found.thresholds(wanted)
    chosen = {"low_threshold": thresholds.low, "skip_threshold": thresholds.skip}
    return Measured(
        found,
        "the profile is stored for --precision-shares and --preset hobbit",
        {"precision_shares": list(wanted)} | chosen | found.as_json(),
        lambda: print(
            f"T1 {thresholds.low:g} (low_threshold), T2 {thresholds.skip:g} (skip_threshold) "
            f"for shares of {shares}, by {found}"
        ),
    )


def _read(model: str, engine: EngineOptions, tuned: TuneOptions) -> ImportanceProfile:
    """Return the importance profile of a text that the model itself reads, without low-precision copies and
    substitution."""
    from smoe.cli.console import progress
    from smoe.eval.texts import read_documents
    from smoe.presets import exact

    texts, config = read_documents(tuned.text), exact(engine.config())
    import_libraries(model, config)
    from smoe.cli.session import loaded
    from smoe.eval.profile_importance import check_enough, profile_reading

    ids = token_ids(model, engine.revision, texts, tuned.tokens or _TOKENS)
    check_enough(len(ids), "text")
    with loaded(model, config, engine.revision) as ready, progress("tune", "tokens") as bars:
        task = bars.add_task("reading the text", total=len(ids), amount="")
        source = "the demo's stories" if tuned.text is None else tuned.text.name
        return profile_reading(ready, ids, source, lambda count: bars.update(task, advance=count))


def _recorded(model: str, engine: EngineOptions, tuned: TuneOptions) -> ImportanceProfile:
    """Return the importance profile of a recorded run of this model."""
    from itertools import takewhile

    import_libraries(model, None)
    from smoe.eval.profile_importance import profile_recorded
    from smoe.models.read_spec import read_spec
    from smoe.trace.file import Trace

    assert tuned.trace is not None
    path, tokens = tuned.trace[0], tuned.tokens or _TOKENS
    trace = Trace(path)
    with reading("headers", model):
        spec = read_spec(model, engine.config(), engine.revision)
    ours = {site.layer: (site.experts, spec.anatomy.top_k[site.layer]) for site in spec.sites}
    theirs = {layer.layer: (layer.experts, layer.top_k) for layer in trace.header.layers}
    if ours != theirs or trace.header.model_type != spec.config.model_type:
        raise ConfigError(
            f"{path} was recorded with another model ({trace.header.model}), whose layers and experts differ from "
            f"those of {model}; give a trace of this model",
            setting="trace",
            given=str(path),
            allowed="a trace of the same model",
        )
    seen: dict[int, int] = {}

    def is_early(routing: Any) -> bool:
        seen[routing.layer] = seen.get(routing.layer, 0) + len(routing.top_k_index)
        return seen[routing.layer] < tokens + len(routing.top_k_index)

    return profile_recorded(takewhile(is_early, trace.routings(with_weights=True)), path.name)
