"""`smoe tune --prices`: measures the quality cost of a substitute, of a low-precision copy and of a dropped expert."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from smoe.cli.libraries import import_libraries, token_ids
from smoe.cli.options import EngineOptions, substituting

if TYPE_CHECKING:
    from smoe.load.priced_answers import PricedAnswers


def price_answers(model: str, options: EngineOptions, text: Path | None, tokens: int | None, as_json: bool) -> None:
    """Measure the quality cost of each way to resolve a miss, on at most `tokens` tokens of text. Store and print the
    costs."""
    from smoe.cli.console import note, print_json
    from smoe.cli.keeping import ResultDestination
    from smoe.eval.texts import read_documents

    documents = read_documents(text)
    config = substituting(options)
    import_libraries(model, config)
    from smoe.cli.session import loaded
    from smoe.eval.answer_prices import measure
    from smoe.load.priced_answers import PricedAnswers
    from smoe.models.files import fetch

    ids = token_ids(model, options.revision, ["\n\n".join(documents)], tokens)
    keeping = ResultDestination()
    with loaded(model, config, options.revision) as ready:
        found = _measured(ready, ids, measure)
    priced = PricedAnswers(
        table=found.table,
        errors=found.errors,
        low_precision=config.low_precision,
        tokens=found.tokens,
        text="stories of the demo" if text is None else str(text),
    )
    path = keeping.keep(lambda: priced.store(fetch(model, options.revision)))
    if path is not None:
        note(f"stored in {path}")
    if as_json:
        print_json({"model": model} | priced.as_json() | {"rounding_nats": found.rounding})
    else:
        _print_table(priced)


def _measured(ready: Any, ids: list[int], measure: Any) -> Any:
    from smoe.cli.console import progress
    from smoe.eval.answer_prices import passes_of

    with progress("tune", "passes") as bars:
        task = bars.add_task("measuring", total=passes_of(ready.offload, ids), amount="")
        return measure(ready, ids, lambda count: bars.update(task, advance=count))


def _print_table(priced: PricedAnswers) -> None:
    from rich.table import Table

    from smoe.cli.console import note, output

    table = Table(box=None, header_style="dim", pad_edge=False)
    for head in ("layer", "low", "+/-", "substitute", "+/-", "dropped", "+/-"):
        table.add_column(head, justify="right")
    for layer, prices in sorted(priced.table.layers.items()):
        errors = priced.errors.layers[layer]
        pairs = zip(
            (prices.low, prices.substitute, prices.skip), (errors.low, errors.substitute, errors.skip), strict=True
        )
        shown = [f"{nats:.2g}" for pair in pairs for nats in pair]
        table.add_row(str(layer), *(shown if priced.low_precision != "none" else ["-", "-", *shown[2:]]))
    output().print(table)
    note(
        "Each number is the quality cost, in nats, of one miss of an expert that has all of its token's routing "
        "weight. The cost falls with the square of the routing weight. A substitute whose score equals the missing "
        "expert's costs twice as much as a substitute of score 0. +/- precedes the standard error."
    )
