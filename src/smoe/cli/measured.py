"""The result of a measurement of `smoe tune`, which is stored for the model and printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smoe.cli.options import EngineOptions
from smoe.cli.tune_options import TuneOptions

if TYPE_CHECKING:
    from smoe.load.learned_file import LearnedValue
    from smoe.load.tuned import TunedValue

Measure = Callable[[str, EngineOptions, TuneOptions], "Measured"]
"""A function that measures a tuned value. Its arguments are the model's name and the options."""


@dataclass(frozen=True)
class Measured:
    """A tuned value that was measured, and how it is reported."""

    value: TunedValue | LearnedValue
    stored: str
    """A phrase that says what is stored and which options use it."""
    json: dict[str, Any]
    """The result for --json, without the model's name."""
    show: Callable[[], None]
    """Prints the result for a person."""
    notes: tuple[str, ...] = ()


def report(measure: Measure) -> Callable[[str, EngineOptions, TuneOptions, bool], None]:
    """Return a function that measures a tuned value, stores it for the model, and prints it."""

    def run(model: str, engine: EngineOptions, tuned: TuneOptions, as_json: bool) -> None:
        from smoe.cli.console import note, print_json
        from smoe.cli.keeping import ResultDestination

        keeping = ResultDestination()
        found = measure(model, engine, tuned)
        from smoe.models.files import fetch  # imports libraries

        path = keeping.keep(lambda: found.value.store(fetch(model, engine.revision)))
        if path is not None:
            note(f"{found.stored} in {path}")
        for line in found.notes:
            note(line)
        if as_json:
            print_json({"model": model} | found.json)
        else:
            found.show()

    return run
