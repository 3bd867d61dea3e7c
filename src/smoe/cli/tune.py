"""`smoe tune`: how much substitution does a time per token take?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.options import Debug, EngineOptions, Json, Model, substituting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smoe.config import EngineConfig
    from smoe.eval.tune import Choice, Tuning

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

    In rounds, so that the noise of this machine is known (+/-: half of what lies between the fastest and the slowest);
    the choice is measured once more. Where experts come from disk, times are told for one rate of reading, as a disk
    may be twice as fast in the next minute. The result is remembered for this model, budget and machine; `smoe generate
    --tpot` uses it.
    """
    from smoe.units import parse_seconds

    budget = parse_seconds(tpot) if tpot is not None else None
    _tune(model, substituting(engine), engine.revision, text, budget, json)


def _tune(
    model: str, config: EngineConfig, revision: str | None, text: Path | None, budget: float | None, as_json: bool
) -> None:
    """Measure, remember, show, and choose where there is a budget."""
    from smoe.cli.console import note
    from smoe.cli.session import loaded, tokenizer_of
    from smoe.eval.texts import read_documents
    from smoe.eval.tune import store

    texts = read_documents(text)
    tokenizer = tokenizer_of(model, revision)
    with loaded(model, config, revision) as ready:
        offload: Any = ready.offload
        ids = [token for document in texts for token in tokenizer(document)["input_ids"]][: offload.context_tokens]
        tuning = _measure(ready, model, ids)
        note(f"remembered for smoe generate --tpot in {store(tuning)}")
        if not as_json:
            _print_table(tuning)
        if tuning.bytes_per_second is not None:
            note(_rates(tuning, tuning.bytes_per_second))
        if tuning.is_flat:
            note(_flat(tuning))
        choice = _choose(ready, tuning, budget, ids) if budget is not None else None
    if choice is not None and choice.is_within_noise:
        note(_unsure(tuning, choice))
    if as_json:
        _print_json(tuning, choice)
    elif choice is not None:
        _print_choice(tuning, choice)


def _measure(ready: PreTrainedModel, model: str, ids: list[int]) -> Tuning:
    from smoe.cli.console import progress
    from smoe.eval.tune import circumstances_of, measure_times, steps_of

    offload: Any = ready.offload
    with progress("tune", "tokens") as bars:
        task = bars.add_task("measuring", total=steps_of(ALPHAS), amount="")
        circumstances = circumstances_of(model, offload)
        return measure_times(ready, ALPHAS, ids, circumstances, lambda count: bars.update(task, advance=count))


def _choose(ready: PreTrainedModel, tuning: Tuning, budget: float, ids: list[int]) -> Choice:
    from smoe.cli.console import progress
    from smoe.eval.tune import choose, turn_tokens

    with progress("tune", "tokens") as bars:
        task = bars.add_task("measuring the choice once more", total=turn_tokens(), amount="")
        return choose(ready, tuning, budget, ids, lambda count: bars.update(task, advance=count))


def _flat(tuning: Tuning) -> str:
    from smoe.units import format_seconds

    return (
        f"alpha changes nothing here: from {tuning.alphas[0]:g} to {tuning.alphas[-1]:g} the time per token stays the "
        f"same within the noise (+/- {format_seconds(tuning.noise_seconds)}); "
        "0, which replaces nothing, is as fast as any"
    )


def _rates(tuning: Tuning, rate: float) -> str:
    from smoe.units import format_bytes_rate

    lowest, highest = format_bytes_rate(min(tuning.rates)), format_bytes_rate(max(tuning.rates))
    return (
        f"experts were read at {lowest} to {highest}; a token's time is told for {format_bytes_rate(rate)}, and by the "
        "clock as it was measured"
    )


def _unsure(tuning: Tuning, choice: Choice) -> str:
    from smoe.units import format_seconds

    low, high = f"{choice.lowest_alpha:g}", choice.highest_alpha
    found = f"anything from {low} to {high:g}" if high is not None else f"{low}, or higher, or none at all"
    return (
        f"{format_seconds(choice.tpot_seconds)} a token is within the noise of what was measured (+/- "
        f"{format_seconds(tuning.noise_seconds)}): the smallest alpha that meets it may be {found}"
    )


def _print_table(tuning: Tuning) -> None:
    from rich.table import Table

    from smoe.cli.console import output
    from smoe.units import format_seconds

    table = Table(box=None, header_style="dim", pad_edge=False)
    is_rescaled = tuning.bytes_per_second is not None
    for head in ("alpha", "a token", "+/-", *(["by the clock"] if is_rescaled else [])):
        table.add_column(head, justify="right")
    rows = zip(tuning.points, tuning.half_range_seconds, tuning.measured_seconds, strict=True)
    for (alpha, seconds), half_range, measured in rows:
        shown = [seconds, half_range, *([measured] if is_rescaled else [])]
        table.add_row(f"{alpha:g}", *(format_seconds(time) for time in shown))
    output().print(table)


def _print_choice(tuning: Tuning, choice: Choice) -> None:
    from smoe.units import format_bytes_rate, format_seconds

    budget = format_seconds(choice.tpot_seconds)
    verdict = f"meets {budget} a token within 10 %" if choice.is_met else f"misses {budget} a token by more than 10 %"
    measured = f"measured {format_seconds(choice.measured_seconds)}"
    if choice.measured_bytes_per_second is not None and tuning.bytes_per_second is not None:
        measured += (
            f" while experts were read at {format_bytes_rate(choice.measured_bytes_per_second)}, which is "
            f"{format_seconds(choice.rescaled_seconds)} at {format_bytes_rate(tuning.bytes_per_second)}"
        )
    print(f"alpha {choice.alpha:g} {verdict}: predicted {format_seconds(choice.predicted_seconds)}, {measured}")


def _print_json(tuning: Tuning, choice: Choice | None) -> None:
    """The same names with and without a budget."""
    from dataclasses import asdict, fields

    from smoe.cli.console import print_json
    from smoe.eval.tune import Choice

    chosen = asdict(choice) if choice else dict.fromkeys(field.name for field in fields(Choice))
    print_json(tuning.as_json() | chosen)
