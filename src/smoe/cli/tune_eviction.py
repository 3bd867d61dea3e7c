"""`smoe tune --eviction learned --cache`: trains the eviction policy `learned` on recorded traces."""

from __future__ import annotations

from pathlib import Path

from smoe.cli.libraries import import_libraries
from smoe.cli.options import EngineOptions


def tune_eviction(
    model: str, engine: EngineOptions, traces: list[Path], held_out: list[Path], passes: int | None, as_json: bool
) -> None:
    """Train the eviction policy's estimate of each expert's next use on traces. Store the estimate, and print the
    misses of each policy."""
    from smoe.cli.console import note, print_json, progress
    from smoe.cli.eviction_table import print_evictions
    from smoe.cli.keeping import ResultDestination

    import_libraries(model, None)
    from smoe.eval import tune_eviction as tuning
    from smoe.models.files import fetch

    keeping = ResultDestination()
    with progress("tune", "steps") as bars:
        task = bars.add_task("learning", total=None, amount="")

        def tick(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total, amount=f"{done} of {total}")

        found = tuning.tune_eviction(model, engine.config(), engine.revision, traces, held_out, passes, tick)
    path = keeping.keep(lambda: found.trained.store(fetch(model, engine.revision)))
    if path is not None:
        note(f"the trained policy is stored for --eviction learned in {path}")
    if found.held_out is None:
        note("the trained policy is not tested on other text; to test it, give traces of other text with --held-out")
    if as_json:
        print_json({"model": model, "traces": [*map(str, traces)], "held_out": [*map(str, held_out)]} | found.as_json())
        return
    size, steps = f"{found.slots} slots ({found.resident_share:.0%} of the experts)", found.trained.decode_steps
    print_evictions(f"{size}, learned from {steps} steps", "misses", "auto", found.misses, found.held_out)
