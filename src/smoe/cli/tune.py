"""`smoe tune`: how much substitution does a time per token take?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.options import Debug, EngineOptions, Json, Model, substituting

if TYPE_CHECKING:
    from smoe.eval.tune import Tuning

EPILOG = """Examples:

smoe tune ./my-moe --memory 8GiB --tpot 80ms

smoe generate ./my-moe --memory 8GiB --tpot 80ms -p "..."     (uses what was measured)

smoe eval ./my-moe --memory 8GiB says what the threshold costs.
"""

ALPHAS = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def command(
    engine: EngineOptions,
    model: Model = "demo",
    tpot: Annotated[str | None, typer.Option(help="Time per token that must be met, such as 80ms.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text to measure on: .txt or .jsonl. Default: stories.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the time per token for thresholds from 0 to 0.6, and name the smallest that meets a budget.

    The result is remembered for this model, budget and machine; `smoe generate --tpot` uses it.
    """
    from smoe.cli.console import note, print_json
    from smoe.eval.tune import store
    from smoe.units import format_seconds, parse_seconds

    budget = parse_seconds(tpot) if tpot is not None else None
    tuning = _measure(engine, model, text)
    note(f"remembered in {store(tuning)}")
    alpha = tuning.alpha_for(budget) if budget is not None else None
    if json:
        print_json(tuning.circumstances | {"points": tuning.points, "tpot_seconds": budget, "alpha": alpha})
        return
    _print_table(tuning)
    if budget is not None:
        print(f"alpha {alpha:g} meets {format_seconds(budget)} a token")


def _measure(options: EngineOptions, model: str, text: Path | None) -> Tuning:
    from smoe.cli.console import progress
    from smoe.cli.session import loaded, tokenizer_of
    from smoe.eval.texts import read_documents
    from smoe.eval.tune import circumstances_of, measure_times, steps_of

    texts = read_documents(text)
    tokenizer = tokenizer_of(model, options.revision)
    with loaded(model, substituting(options), options.revision) as ready, progress("tune", "tokens") as bars:
        offload: Any = ready.offload
        ids = [token for document in texts for token in tokenizer(document)["input_ids"]][: offload.context_tokens]
        task = bars.add_task("measuring", total=steps_of(ALPHAS), amount="")
        circumstances = circumstances_of(model, offload)
        return measure_times(ready, ALPHAS, ids, circumstances, lambda count: bars.update(task, advance=count))


def _print_table(tuning: Tuning) -> None:
    from rich.table import Table

    from smoe.cli.console import output
    from smoe.units import format_seconds

    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("alpha", justify="right")
    table.add_column("a token", justify="right")
    for alpha, seconds in tuning.points:
        table.add_row(f"{alpha:g}", format_seconds(seconds))
    output().print(table)
