"""`smoe tune --cache`: fits the weights of the multidimensional cache on recorded traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from smoe.cli.libraries import import_libraries
from smoe.cli.options import EngineOptions

if TYPE_CHECKING:
    from smoe.config import EngineConfig

STEPS = 300
"""The default number of decode steps that are used of each trace."""


def tune_cache(
    model: str, engine: EngineOptions, fitted: list[Path], held_out: list[Path], steps: int, as_json: bool
) -> None:
    """Fit the weights of the multidimensional cache on traces; store and print them."""
    from smoe.cli.console import note, print_json, progress
    from smoe.cli.eviction_table import print_evictions
    from smoe.cli.keeping import ResultDestination

    import_libraries(model, None)
    from smoe.eval import tune_cache as tuning
    from smoe.load.cache_weights import FittedWeights
    from smoe.models.files import fetch

    keeping = ResultDestination()
    with progress("tune", "trials") as bars:
        task = bars.add_task("trying weights", total=None, amount="")

        def tick(done: int, least: int) -> None:
            bars.update(task, completed=done, total=least, amount=f"{done} of about {least} trials")

        found = tuning.tune_cache(model, _config(engine), engine.revision, fitted, held_out, steps, tick)
    result = FittedWeights(found.weights, found.resident_share, found.decode_steps)
    path = keeping.keep(lambda: result.store(fetch(model, engine.revision)))
    if path is not None:
        note(f"the weights are stored for --eviction multidimensional in {path}")
    if found.held_out is None:
        note("the weights are not tested on other text; to test them, give traces of other text with --held-out")
    if as_json:
        print_json({"model": model, "traces": [*map(str, fitted)], "held_out": [*map(str, held_out)]} | found.as_json())
        return
    heading = (
        f"{found.cache.slots} slots ({found.resident_share:.0%} of the experts) and {found.cache.low_slots} for "
        f"low-precision copies; a miss of such a copy costs {found.cache.low_cost:.2f} of a full one"
    )
    print_evictions(heading, "penalty", "lru", found.penalties, found.held_out)
    lru, lfu, lhu, fld = found.weights
    print(
        f"cache_weights {lru:.3g},{lfu:.3g},{lhu:.3g},{fld:.3g} (lru {lru:.3g}, lfu {lfu:.3g}, lhu {lhu:.3g}, fld "
        f"{fld:.3g}) cost least among those tried"
    )


def _config(options: EngineOptions) -> EngineConfig:
    """Return the configuration whose cache is tuned: that of the preset hobbit if no preset is given."""
    if options.preset == "exact":
        options = replace(options, preset="hobbit")
    return replace(options.config(), alpha=0.0, alpha_as_priced=False)
