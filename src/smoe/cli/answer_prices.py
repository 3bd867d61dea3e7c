"""`smoe tune --prices`: measures the quality cost of a substitute, of a low-precision copy and of a dropped expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smoe.cli.libraries import import_libraries, token_ids
from smoe.cli.measured import Measured
from smoe.cli.options import EngineOptions, substituting
from smoe.cli.tune_options import TuneOptions

if TYPE_CHECKING:
    from smoe.eval.answer_prices import AnswerPrices
    from smoe.load.priced_answers import PricedAnswers


def price_answers(model: str, engine: EngineOptions, tuned: TuneOptions) -> Measured:
    """Measure the quality cost of each way to resolve a miss."""
    from smoe.eval.texts import read_documents

    documents = read_documents(tuned.text)
    config = substituting(engine)
    import_libraries(model, config)
    from smoe.cli.session import loaded
    from smoe.load.priced_answers import PricedAnswers

    ids = token_ids(model, engine.revision, ["\n\n".join(documents)], tuned.tokens)
    with loaded(model, config, engine.revision) as ready:
        found = _measured(ready, ids)
    priced = PricedAnswers(
        table=found.table,
        errors=found.errors,
        low_precision=config.low_precision,
        tokens=found.tokens,
        text="stories of the demo" if tuned.text is None else str(tuned.text),
    )
    return Measured(
        priced, "stored", priced.as_json() | {"rounding_nats": found.rounding}, lambda: _print_table(priced)
    )


def _measured(ready: Any, ids: list[int]) -> AnswerPrices:
    from smoe.cli.console import progress
    from smoe.eval.answer_prices import measure, passes_of

    with progress("tune", "passes") as bars:
        task = bars.add_task("measuring", total=passes_of(ready.offload, ids), amount="")
        return measure(ready, ids, lambda count: bars.update(task, advance=count))


def _print_table(priced: PricedAnswers) -> None:
    from smoe.cli.console import note, print_rows

    rows = []
    for layer, prices in sorted(priced.table.layers.items()):
        errors = priced.errors.layers[layer]
        pairs = zip(
            (prices.low, prices.substitute, prices.skip), (errors.low, errors.substitute, errors.skip), strict=True
        )
        shown = [f"{nats:.2g}" for pair in pairs for nats in pair]
        rows.append([str(layer), *(shown if priced.low_precision != "none" else ["-", "-", *shown[2:]])])
    print_rows(("layer", "low", "+/-", "substitute", "+/-", "dropped", "+/-"), rows)
    note(
        "Each number is the quality cost, in nats, of one miss of an expert that has all of its token's routing "
        "weight. The cost falls with the square of the routing weight. A substitute whose score equals the missing "
        "expert's costs twice as much as a substitute of score 0. +/- precedes the standard error."
    )
