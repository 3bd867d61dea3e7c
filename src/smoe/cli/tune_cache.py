"""`smoe tune --cache`: fits the weights of the multidimensional cache, or trains the eviction policy `learned`, on
recorded traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from smoe.cli.libraries import import_libraries
from smoe.cli.measured import Measured
from smoe.cli.options import EngineOptions
from smoe.cli.tune_options import TuneOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smoe.config import EngineConfig

_STEPS = 300
"""The default number of decode steps of each trace to which weights are fitted."""


def tune_cache(model: str, engine: EngineOptions, tuned: TuneOptions) -> Measured:
    """Fit the weights of the multidimensional cache on traces."""
    import_libraries(model, None)
    from smoe.eval import tune_cache as tuning
    from smoe.load.cache_weights import FittedWeights

    fitted, held_out, steps = tuned.cache or [], tuned.held_out or [], tuned.tokens or _STEPS
    with _bar("trials", "trying weights") as update:

        def tick(done: int, least: int) -> None:
            update("trying weights", done, least, f"{done} of about {least} trials")

        found = tuning.tune_cache(model, _config(engine), engine.revision, fitted, held_out, steps, tick)

    def show() -> None:
        heading = (
            f"{found.cache.slots} slots ({found.resident_share:.0%} of the experts) and {found.cache.low_slots} for "
            f"low-precision copies; a miss of such a copy costs {found.cache.low_cost:.2f} times a miss of an expert"
        )
        _print_evictions(heading, "penalty", "lru", found.penalties, found.held_out)
        lru, lfu, lhu, fld = found.weights
        print(
            f"cache_weights {lru:.3g},{lfu:.3g},{lhu:.3g},{fld:.3g} (lru {lru:.3g}, lfu {lfu:.3g}, lhu {lhu:.3g}, fld "
            f"{fld:.3g}) cost least among those tried"
        )

    return Measured(
        FittedWeights(found.weights, found.resident_share, found.decode_steps),
        "the weights are stored for --eviction multidimensional",
        _traces(tuned) | found.as_json(),
        show,
        _untested("the weights are", "them", tuned),
    )


def tune_eviction(model: str, engine: EngineOptions, tuned: TuneOptions) -> Measured:
    """Train the eviction policy's estimate of each expert's next use on traces."""
    import_libraries(model, None)
    from smoe.eval import tune_eviction as tuning

    traces, held_out = tuned.cache or [], tuned.held_out or []
    with _bar("steps", "learning") as update:

        def tick(what: str, done: int, total: int) -> None:
            update(what, done, total, f"{done} of {total}")

        found = tuning.tune_eviction(model, engine.config(), engine.revision, traces, held_out, tuned.tokens, tick)

    def show() -> None:
        size, steps = f"{found.slots} slots ({found.resident_share:.0%} of the experts)", found.trained.decode_steps
        _print_evictions(f"{size}, learned from {steps} steps", "misses", "auto", found.misses, found.held_out)

    return Measured(
        found.trained,
        "the trained policy is stored for --eviction learned",
        _traces(tuned) | found.as_json(),
        show,
        _untested("the trained policy is", "it", tuned),
    )


def _config(options: EngineOptions) -> EngineConfig:
    """Return the configuration whose cache is tuned: that of the preset hobbit if no preset is given."""
    if options.preset in (None, "exact"):
        options = replace(options, preset="hobbit")
    return replace(options.config(), alpha=0.0, alpha_as_priced=False)


def _traces(tuned: TuneOptions) -> dict[str, list[str]]:
    return {"traces": [*map(str, tuned.cache or [])], "held_out": [*map(str, tuned.held_out or [])]}


def _untested(what: str, it: str, tuned: TuneOptions) -> tuple[str, ...]:
    if tuned.held_out:
        return ()
    return (f"{what} not tested on other text; to test {it}, give traces of other text with --held-out",)


@contextmanager
def _bar(unit: str, what: str) -> Iterator[Callable[[str, int, int, str], None]]:
    """Yield a function (activity, steps done, their total, text) that updates a progress bar."""
    from smoe.cli.console import progress

    with progress("tune", unit) as bars:
        task = bars.add_task(what, total=None, amount="")
        yield lambda now, done, total, text: bars.update(
            task, description=now, completed=done, total=total, amount=text
        )


def _print_evictions(
    heading: str, unit: str, usual: str, figures: Mapping[str, float], held_out: Mapping[str, float] | None
) -> None:
    """Print a heading, then one line for each policy: its number in `unit` on the traces that it was fitted to and on
    other traces, and the difference from the number of the policy `usual`."""
    from smoe.cli.console import output, print_rows

    columns = {unit: figures} | ({"held out": held_out} if held_out else {})
    rows = []
    for name in figures:
        row = [name]
        for found in columns.values():
            base = found[usual]
            row += [f"{found[name]:,.0f}", f"{found[name] / base - 1:+.1%}" if base else ""]
        rows.append(row)
    output().print(heading, markup=False, soft_wrap=True)
    print_rows(["eviction", *(head for unit in columns for head in (unit, f"relative to {usual}"))], rows, left=1)
