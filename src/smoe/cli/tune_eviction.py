"""`smoe tune --eviction learned --cache`: the estimate of the next use, trained on recorded traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from smoe.cli.options import EngineOptions

if TYPE_CHECKING:
    from smoe.eval.tune_eviction import EvictionTuning


def tune_eviction(
    model: str, engine: EngineOptions, traces: list[Path], held_out: list[Path], passes: int | None, as_json: bool
) -> None:
    """Train, remember and show."""
    from smoe.cli.console import note, print_json, progress
    from smoe.cli.keeping import Keeping
    from smoe.eval import tune_eviction as tuning
    from smoe.load.next_use import remember
    from smoe.models.files import fetch

    keeping = Keeping()
    with progress("tune", "steps") as bars:
        task = bars.add_task("learning", total=None, amount="")

        def tick(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total, amount=f"{done} of {total}")

        found = tuning.tune_eviction(model, engine.config(), engine.revision, traces, held_out, passes, tick)
    path = keeping.keep(lambda: remember(fetch(model, engine.revision), found.trained))
    if path is not None:
        note(f"remembered for --eviction learned in {path}")
    if found.held_out is None:
        note("what it is worth on other text is not known: give traces of some with --held-out")
    if as_json:
        print_json({"model": model, "traces": [*map(str, traces)], "held_out": [*map(str, held_out)]} | found.as_json())
        return
    _print_table(found)


def _print_table(found: EvictionTuning) -> None:
    from rich.table import Table

    from smoe.cli.console import output

    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("eviction")
    for head in ("misses", "beside auto", *(["held out", "beside auto"] if found.held_out else [])):
        table.add_column(head, justify="right")
    for name in found.misses:
        cells = []
        for misses in (found.misses, found.held_out):
            if misses is not None:
                usual = misses["auto"]
                cells += [f"{misses[name]:,}", f"{misses[name] / usual - 1:+.1%}" if usual else ""]
        table.add_row(name, *cells)
    output().print(
        f"{found.slots} slots ({found.resident_share:.0%} of the experts), learned from {found.trained.decode_steps} "
        "steps",
        markup=False,
        soft_wrap=True,
    )
    output().print(table)
