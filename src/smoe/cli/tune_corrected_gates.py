"""`smoe tune --predictor corrected-gates`: learns how the layers between two routers change a router's input."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from smoe.cli.libraries import import_libraries, reading, token_ids
from smoe.cli.options import EngineOptions

if TYPE_CHECKING:
    from smoe.eval.learn_corrections import FittedCorrections

TOKENS = 8000
"""The default number of tokens of the text: twice as many give half a point more recall."""


def tune_corrected_gates(model: str, engine: EngineOptions, text: Path | None, tokens: int, as_json: bool) -> None:
    """Learn corrections on a text and store them for the model. Print their recall on the last tenth of the text, from
    which nothing was learned."""
    from smoe.cli.console import note, print_json
    from smoe.cli.keeping import ResultDestination

    import_libraries(model, engine.config())
    from smoe.load.gate_corrections import LearnedCorrections
    from smoe.models.files import fetch

    keeping = ResultDestination()
    found = _learn(model, engine, text, tokens)
    result = LearnedCorrections(found.corrections, found.tokens, "the demo's stories" if text is None else text.name)
    path = keeping.keep(lambda: result.store(fetch(model, engine.revision)))
    if path is not None:
        note(f"the corrections are stored for --prefetch corrected-gates in {path}")
    if as_json:
        judged = [each._asdict() for each in found.judged]
        rest = {"tokens": result.tokens, "text": result.text, "seconds_per_layer": found.seconds_per_layer}
        print_json({"model": model, "judged": judged} | rest)
    else:
        _print_table(found)


def _learn(model: str, engine: EngineOptions, text: Path | None, tokens: int) -> FittedCorrections:
    """Return corrections learned from a text that the model reads, without low-precision copies and substitution."""
    from dataclasses import replace

    from smoe.cli.console import progress
    from smoe.cli.session import loaded
    from smoe.eval.learn_corrections import check_enough, learn, pairs_of
    from smoe.eval.texts import read_documents
    from smoe.models.read_spec import read_spec
    from smoe.presets import without_low_copies

    ids = token_ids(model, engine.revision, read_documents(text), tokens)
    check_enough(len(ids))
    exact = replace(without_low_copies(engine.config()), alpha=0.0, alpha_as_priced=False)
    # the stacked gates have the same requirements: routers that are plain products, with known rules
    config = replace(exact, prefetch="stacked-gates", prefetch_asked=None, prefetch_depth=1)
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
    from rich.table import Table

    from smoe.cli.console import output
    from smoe.policy.trial import WORTH
    from smoe.units import format_seconds

    table = Table(box=None, header_style="dim", pad_edge=False)
    for head in ("layers ahead", "next gate", "corrected", "requested: right", "of the chosen"):
        table.add_column(head, justify="right")
    for each in found.judged:
        shares = (each.next_gate, each.corrected, each.precision, each.recall)
        table.add_row(str(each.distance), *(f"{share:.1%}" for share in shares))
    output().print(table)
    print(
        f"next gate, corrected: which share of the chosen experts each predicts, on the last tenth of {found.tokens} "
        f"tokens. requested: only experts that are needed with a probability of {WORTH:g} or more. a prediction takes "
        f"{format_seconds(found.seconds_per_layer)} a layer"
    )
