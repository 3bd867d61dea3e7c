"""`smoe bench`: measures the speed of a model on this machine, within a memory budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.libraries import import_libraries
from smoe.cli.options import Debug, EngineOptions, Json, Model
from smoe.cli.plot_file import check_plot
from smoe.errors import BudgetError, ConfigError
from smoe.units import format_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smoe.benchmark.cells import Measurement, TableCell
    from smoe.config import EngineConfig

EPILOG = """Examples:

smoe bench --quick

smoe bench ./my-moe --memory 8GiB

smoe bench ./my-moe --memory 8GiB --eviction lfu > lfu.json

smoe bench ./my-moe --memory 8GiB --ablation smoe     (the gain of each mechanism of the paper)

smoe bench ./my-moe --memory 8GiB --share     (a short block to post)

smoe bench ./my-moe --memory 8GiB --ablation smoe --device emulated --profile rtx-4060-ti

The table goes to stderr. If stdout is not a terminal, or with --json, one
line of JSON goes to stdout. When you quote a figure, name the machine and
the budget.
"""

_PHYSICS = """A prompt (prefill) loads every expert of a layer once: arithmetic or the disk limits its speed.
A new token (decode) uses top-k experts of each layer: the disk limits it for missing experts, else memory does.
The column "limit" shows which share of the speed of the slowest part was reached (docs/metrics.md)."""


def command(
    engine: EngineOptions,
    model: Model = "demo",
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure only 16 prompt and 64 new tokens, batch 1 and 3.")
    ] = False,
    share: Annotated[
        bool, typer.Option("--share", help="Measure only 128 prompt and 64 new tokens; print a short block to post.")
    ] = False,
    ablation: Annotated[
        str | None,
        typer.Option(
            help="Instead of the benchmark: switch on the mechanisms of a paper one after the other, and measure the "
            "speed after each step. The only value is smoe."
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="With --ablation: file with the text to measure on. Default: stories.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="With --ablation: number of times that each step is measured. \\[default: 2]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed from which the prompts are drawn.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="With --ablation: draw the result into this file (.png, .svg).")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="With --ablation: number of sequences that run together. \\[default: 1]")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="With --ablation: number of tokens that are generated in each measurement. \\[default: 64]"),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the speed of a model: 16 or 128 prompt tokens, 64 or 256 new ones, batch 1 and 3, as in the papers.

    The JSON contains machine, versions, model, budget, and the figures of every measurement.
    """
    from smoe.cli.console import errors, is_quiet
    from smoe.generation.sampling_settings import check_seed

    check_seed(seed)
    given = {"text": text, "rounds": rounds, "batch": batch, "plot": plot, "tokens": tokens}
    _check(given, ablation, quick, share, engine.preset)
    if ablation is not None:
        from smoe.cli.checkout import from_checkout

        ablate = from_checkout("mechanisms.command", "smoe bench --ablation").ablate_model
        ablate(model, engine, ablation, text, (rounds, batch, tokens), plot, json)
        return
    if not is_quiet():
        errors().print(_PHYSICS, soft_wrap=True)
    import_libraries(model, None)  # the budget is checked later, for the context of the measurements
    from smoe.benchmark.cells import CELLS, QUICK_CELLS
    from smoe.benchmark.shared_block import SHARED_CELL

    _measure_cells(model, engine, [SHARED_CELL] if share else QUICK_CELLS if quick else CELLS, seed, share, json)


def _measure_cells(
    model: str, engine: EngineOptions, cells: list[TableCell], seed: int, share: bool, json: bool
) -> None:
    """Load the model, measure the cells that fit the budget and its context, and print them. Ends with the exit code of
    an interrupt if one left cells out."""
    from smoe.cli.console import warn

    alone = [cell for cell in cells if cell.batch == 1]
    try:
        _measure_fitting(model, engine, cells, seed, share, json)
    except BudgetError:
        if len(alone) == len(cells):
            raise
        skipped, most = len(cells) - len(alone), max(cell.batch for cell in cells)
        warn(f"skipping {format_count(skipped, 'measurement')}, because the budget cannot hold {most} sequences")
        _measure_fitting(model, engine, alone, seed, share, json)


def _measure_fitting(
    model: str, engine: EngineOptions, cells: list[TableCell], seed: int, share: bool, json: bool
) -> None:
    """Load the model for all of the cells, measure those that fit its context, and print them. Raises `BudgetError` if
    the budget cannot hold the largest number of sequences."""
    from smoe.benchmark.cells import fitting
    from smoe.cli.console import warn
    from smoe.cli.interrupts import exit_code, print_interrupted
    from smoe.cli.session import loaded_with_tokenizer

    config = _config(model, engine, cells)
    if config.context_tokens is not None and not fitting(cells, config.context_tokens):
        raise _no_cell(config.context_tokens, cells)
    with loaded_with_tokenizer(model, config, engine.revision) as (ready, tokenizer):
        offload: Any = ready.offload
        possible = fitting(cells, offload.context_tokens)
        if len(possible) < len(cells):
            warn(
                f"skipping {format_count(len(cells) - len(possible), 'measurement')} that a context of "
                f"{offload.context_tokens} tokens cannot hold; raise `context_tokens` to make all"
            )
        measurements = _measure(ready, tokenizer, possible, seed)
        _print(measurements, _circumstances(ready, model, seed), offload.config, share, json)
    if len(measurements) < len(possible):
        print_interrupted(f"{len(measurements)} of {len(possible)} measurements were made")
        raise typer.Exit(exit_code())


def _print(
    measurements: list[Measurement], circumstances: dict[str, Any], config: EngineConfig, share: bool, json: bool
) -> None:
    """Print the table of measurements, and the JSON or the block of text to post."""
    from smoe.benchmark.shared_block import shared_block
    from smoe.cli.console import gives_json, is_quiet, output, print_json

    if not (gives_json(json) and is_quiet()):
        _print_table(measurements)
    figures = [each.as_json() for each in measurements]
    block = shared_block(circumstances, figures[0], config) if share and figures else None
    if block is not None and not json:
        output().print(block, soft_wrap=True, highlight=False, markup=False)
    elif gives_json(json):
        print_json(circumstances | {"cells": figures} | ({} if block is None else {"shared_block": block}))


def _no_cell(context_tokens: int, cells: list[TableCell]) -> ConfigError:
    least = min(cell.prompt_tokens + cell.new_tokens for cell in cells)
    message = f"`context_tokens={context_tokens}` is too short for every cell; the shortest needs {least} tokens"
    allowed = f"at least {least}"
    return ConfigError(f"{message}: give {allowed}", setting="context_tokens", given=context_tokens, allowed=allowed)


def _check(given: dict[str, Any], ablation: str | None, quick: bool, share: bool, preset: str | None) -> None:
    """Raise `ConfigError` if one of the given options would have no effect together with the others."""
    for name, value in given.items():
        if ablation is None and value is not None:
            raise ConfigError.idle(name, value if isinstance(value, int) else str(value), "`ablation` smoe")
        if isinstance(value, int) and value < 1:
            raise ConfigError.out_of_bounds(name, value, "at least 1")
    if ablation is not None and quick:
        message = "--quick has no meaning with --ablation; fewer --rounds make it shorter"
        raise ConfigError(message, setting="quick", given=True, allowed="only without `ablation`")
    if share and (quick or ablation is not None):
        message = f"--share has no meaning with {'--quick' if quick else '--ablation'}; leave one of them out"
        raise ConfigError(message, setting="share", given=True, allowed="only without `quick` and `ablation`")
    if ablation is not None and preset not in (None, "exact"):
        message = "--ablation sets the switches of every step; leave out --preset"
        raise ConfigError(message, setting="preset", given=preset, allowed="only without `ablation`")
    if given["plot"] is not None:
        check_plot(given["plot"])


def _config(model: str, engine: EngineOptions, cells: list[TableCell]) -> EngineConfig:
    """Return the engine's settings. If no context is given, it is just long enough for the measurements, so that
    experts get the remaining memory."""
    from dataclasses import replace

    from smoe.models.checkpoint import described_checkpoint
    from smoe.models.finish_spec import choose_context

    config = engine.config(max(cell.batch for cell in cells))
    if config.context_tokens is not None:
        return config
    needed = max(cell.prompt_tokens + cell.new_tokens for cell in cells)
    model_config = described_checkpoint(model, engine.revision).config()
    return replace(config, context_tokens=min(needed, choose_context(model_config, config)))


def _measure(ready: PreTrainedModel, tokenizer: Any, cells: list[TableCell], seed: int) -> list[Measurement]:
    from smoe.benchmark.cells import measure_cells
    from smoe.cli.console import progress

    with progress("bench", "cells") as bars:
        task = bars.add_task("warming up", total=len(cells), amount="")
        return measure_cells(
            ready,
            tokenizer,
            cells,
            seed,
            lambda cell: bars.update(
                task, description=f"{cell.prompt_tokens} + {cell.new_tokens} tokens, batch {cell.batch}"
            ),
            lambda measurement: bars.update(task, advance=1),
        )


def _print_table(measurements: list[Measurement]) -> None:
    from rich.table import Table

    from smoe.cli.console import errors

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for heading in ("prompt", "new", "batch", "TTFT", "TPOT", "p95", "speed", "hits", "read/token", "limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    for measurement in measurements:
        table.add_row(*_row(measurement))
    console = errors()
    console.print()
    console.print(table)


def _row(measurement: Measurement) -> list[str]:
    from smoe.units import format_bytes, format_rate, format_seconds

    cell, report = measurement.cell, measurement.report
    generation = report.generation

    def shown(value: float | None, form: Any) -> str:
        return "-" if value is None else form(value)

    return [
        str(cell.prompt_tokens),
        str(cell.new_tokens),
        str(cell.batch),
        shown(generation.ttft_seconds, format_seconds),
        shown(generation.tpot_median_seconds, format_seconds),
        shown(generation.tpot_p95_seconds, format_seconds),
        shown(generation.tokens_per_second, format_rate).removesuffix("okens/s").replace(" t", " t/s"),
        shown(report.hit_ratio, "{:.1%}".format),
        shown(report.bytes_read_per_token, format_bytes),
        shown(report.floor_share, "{:.0%}".format),
    ]


def _circumstances(ready: PreTrainedModel, model: str, seed: int) -> dict[str, Any]:
    import torch

    from smoe.machine.measure import describe_machine, describe_versions

    engine: Any = ready.offload
    circumstances = {
        "model": model,
        "seed": seed,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "threads": torch.get_num_threads(),
        "device": str(ready.device),
        "dtype": str(ready.dtype).removeprefix("torch."),
        "eviction": engine.config.eviction,
        "prefetch": engine.config.prefetch,
        "context_tokens": engine.context_tokens,
        "experts": engine.ledger.demand.total_experts,
        "slot_bytes": engine.ledger.demand.slot_bytes,
    }
    return circumstances | dict(engine.describe())
