"""`smoe tune --predictor corrected-gates`: learns how the layers between two routers change a router's input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smoe.cli.libraries import import_libraries, reading, token_ids
from smoe.cli.measured import Measured
from smoe.cli.options import EngineOptions
from smoe.cli.tune_options import TuneOptions
from smoe.errors import ConfigError
from smoe.policy.registry import EXPERT_MLP

if TYPE_CHECKING:
    from smoe.eval.learn_corrections import FittedCorrections

_TOKENS = 8000
"""The default number of tokens of the text: twice as many give half a point more recall."""


def tune_corrected_gates(model: str, engine: EngineOptions, tuned: TuneOptions) -> Measured:
    """Learn corrections on a text, and measure their recall on the last tenth of the text, from which nothing was
    learned."""
    for name, of in (("trace", tuned.trace), ("held_out", tuned.held_out)):
        if of:
            raise ConfigError.idle(name, str(of[0]), f"`predictor={EXPERT_MLP}`, or another that is fitted on traces")
    import_libraries(model, engine.config())
    from smoe.load.gate_corrections import LearnedCorrections

    found, text = _learn(model, engine, tuned), "the demo's stories" if tuned.text is None else tuned.text.name
    rest = {"tokens": found.tokens, "text": text, "seconds_per_layer": found.seconds_per_layer}
    return Measured(
        LearnedCorrections(found.corrections, found.tokens, text),
        "the corrections are stored for --prefetch corrected-gates",
        {"judged": [each._asdict() for each in found.judged]} | rest,
        lambda: _print_table(found),
    )


def _learn(model: str, engine: EngineOptions, tuned: TuneOptions) -> FittedCorrections:
    """Return corrections learned from a text that the model reads, without low-precision copies and substitution."""
    from dataclasses import replace

    from smoe.cli.console import progress
    from smoe.cli.session import loaded
    from smoe.eval.learn_corrections import check_enough, learn, pairs_of
    from smoe.eval.texts import read_documents
    from smoe.models.read_spec import read_spec
    from smoe.presets import exact

    ids = token_ids(model, engine.revision, read_documents(tuned.text), tuned.tokens or _TOKENS)
    check_enough(len(ids))
    # the stacked gates have the same requirements: routers that are plain products, with known rules
    config = replace(exact(engine.config()), prefetch="stacked-gates", prefetch_asked=None, prefetch_depth=1)
    with reading("headers", model):
        spec = read_spec(model, config, engine.revision)
    with loaded(model, config, engine.revision) as ready, progress("tune", "steps") as bars:
        reads = bars.add_task("reading the text, by tokens", total=len(ids), amount="")
        learning = bars.add_task("fitting, by pairs of layers", total=len(pairs_of(spec)), amount="")
        return learn(
            ready,
            spec,
            ids,
            lambda count: bars.update(reads, advance=count),
            lambda count: bars.update(learning, advance=count),
        )


def _print_table(found: FittedCorrections) -> None:
    from smoe.cli.console import print_rows
    from smoe.policy.trial import WORTH
    from smoe.units import format_seconds

    rows = []
    for each in found.judged:
        shares = (each.next_gate, each.corrected, each.precision, each.recall)
        rows.append([str(each.distance), *(f"{share:.1%}" for share in shares)])
    print_rows(("layers ahead", "next gate", "corrected", "requested: right", "of the chosen"), rows)
    print(
        f"next gate, corrected: which share of the chosen experts each predicts, on the last tenth of {found.tokens} "
        f"tokens. requested: only experts that are needed with a probability of {WORTH:g} or more. a prediction takes "
        f"{format_seconds(found.seconds_per_layer)} a layer"
    )
