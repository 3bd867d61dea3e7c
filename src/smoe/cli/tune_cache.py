"""`smoe tune --cache`: the weights of the multidimensional cache, fitted on recorded traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from smoe.cli.options import EngineOptions

if TYPE_CHECKING:
    from smoe.config import EngineConfig
    from smoe.eval.tune_cache import CacheTuning

STEPS = 300
"""Of every trace, where the user does not say."""


def tune_cache(
    model: str, engine: EngineOptions, fitted: list[Path], held_out: list[Path], steps: int, as_json: bool
) -> None:
    """Fit, remember and show."""
    from smoe.cli.console import note, print_json, progress
    from smoe.cli.keeping import Keeping
    from smoe.eval import tune_cache as tuning
    from smoe.load.cache_weights import FittedWeights, remember
    from smoe.models.files import fetch

    keeping = Keeping()
    with progress("tune", "trials") as bars:
        task = bars.add_task("trying weights", total=None, amount="")

        def tick(done: int, least: int) -> None:
            bars.update(task, completed=done, total=least, amount=f"{done} of about {least} trials")

        found = tuning.tune_cache(model, _config(engine), engine.revision, fitted, held_out, steps, tick)
    kept = FittedWeights(found.weights, found.resident_share, found.decode_steps)
    path = keeping.keep(lambda: remember(fetch(model, engine.revision), kept))
    if path is not None:
        note(f"remembered for --eviction multidimensional in {path}")
    if found.held_out is None:
        note("what the weights are worth on other text is not known: give traces of some with --held-out")
    if as_json:
        print_json({"model": model, "traces": [*map(str, fitted)], "held_out": [*map(str, held_out)]} | found.as_json())
        return
    _print_table(found)
    lru, lfu, lhu, fld = found.weights
    print(
        f"cache_weights {lru:.3g},{lfu:.3g},{lhu:.3g},{fld:.3g} (lru {lru:.3g}, lfu {lfu:.3g}, lhu {lhu:.3g}, fld "
        f"{fld:.3g}) cost least of what was tried"
    )


def _config(options: EngineOptions) -> EngineConfig:
    """The configuration whose cache is tuned: HOBBIT's where no preset is named."""
    if options.preset == "exact":
        options = replace(options, preset="hobbit")
    return replace(options.config(), alpha=0.0, alpha_as_priced=False)


def _print_table(found: CacheTuning) -> None:
    from rich.table import Table

    from smoe.cli.console import output

    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("eviction")
    for head in ("penalty", "beside LRU", *(["held out", "beside LRU"] if found.held_out else [])):
        table.add_column(head, justify="right")
    for name in found.penalties:
        cells = []
        for penalties in (found.penalties, found.held_out):
            if penalties is not None:
                lru = penalties["lru"]
                cells += [f"{penalties[name]:,.0f}", f"{penalties[name] / lru - 1:+.1%}" if lru else ""]
        table.add_row(name, *cells)
    output().print(
        f"{found.cache.slots} slots ({found.resident_share:.0%} of the experts) and {found.cache.low_slots} for low "
        f"copies; a low miss costs {found.cache.low_cost:.2f}",
        markup=False,
        soft_wrap=True,
    )
    output().print(table)
