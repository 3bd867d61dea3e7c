"""`smoe tune --predictor`: fits a predictor that uses earlier routing only, on recorded traces."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING

from smoe.cli.libraries import import_libraries, reading
from smoe.cli.measured import Measured
from smoe.cli.options import EngineOptions
from smoe.cli.tune_options import TuneOptions
from smoe.errors import ConfigError
from smoe.policy.registry import FITTED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID

    from smoe.eval.tune_predictor import PredictionRates, PredictorTuning
    from smoe.policy.prediction import Epochs

_TOKENS = 8000
"""The default number of tokens of a text whose routing is recorded."""


def tune_predictor(model: str, engine: EngineOptions, tuned: TuneOptions) -> Measured:
    """Fit the predictor, and measure it on the held-out traces."""
    from smoe.cli.console import note, progress
    from smoe.cli.keeping import ResultDestination

    import_libraries(model, None)
    from smoe.eval import tune_predictor as tuning
    from smoe.load.fitted_predictor import StoredPredictor
    from smoe.load.learned_file import path_of
    from smoe.models.files import fetch
    from smoe.models.read_spec import read_spec
    from smoe.prediction.fitted import fitted_kind
    from smoe.prediction.inputs import routed_layers

    name, traces, held_out = tuned.predictor or "", tuned.trace or [], tuned.held_out or []
    epochs = fitted_kind(name).epochs
    if traces and tuned.text is not None:
        message = "--text and --trace both give the data to fit on; give one of them"
        raise ConfigError(message, setting="trace", given=str(traces[0]), allowed="only without `text`")
    with reading("headers", model):
        layers = routed_layers(read_spec(model, engine.config(), engine.revision))
    path = path_of(name, fetch(model, engine.revision)).with_suffix(".training")
    with _recorded(model, engine, tuned) as recorded, progress("tune", "epochs") as bars:
        if epochs.most:
            note(
                f"training reads the whole text {epochs.least} to {epochs.most} times (epochs); an interrupt loses "
                "only the epoch in progress, and the same command continues after the last complete epoch"
            )
        task = bars.add_task("training", total=epochs.most, amount="", visible=epochs.most > 0)
        judging = bars.add_task("judging", total=len(FITTED), amount="", visible=bool(held_out))
        found = tuning.tune_predictor(
            name,
            recorded,
            held_out,
            layers,
            tuned.tokens,
            path if ResultDestination().can_keep else None,
            _Course(bars, task, epochs),
            lambda predictors: bars.update(judging, completed=predictors),
        )
    untested = "the predictor is not tested on other text; to test it, give traces of other text with --held-out"
    return Measured(
        StoredPredictor(found.fitted),
        f"the predictor is stored for --prefetch {name}",
        {"traces": [*map(str, traces)], "held_out": [*map(str, held_out)]} | found.as_json(),
        lambda: _print(found),
        () if held_out else (untested,),
    )


class _Course:
    """Receives the number of finished training epochs. After the first epoch it prints how long the training will
    take."""

    def __init__(self, bars: Progress, task: TaskID, epochs: Epochs) -> None:
        self._bars, self._task, self._of = bars, task, epochs
        self._began: tuple[int, float] | None = None
        self._is_printed = False

    def __call__(self, epochs: int) -> None:
        from smoe.cli.console import note
        from smoe.units import format_remaining

        if self._began is None:
            self._began = epochs, monotonic()
            self._bars.update(self._task, completed=epochs, skipped=epochs)
            return
        self._bars.update(self._task, completed=epochs)
        before, began = self._began
        if not self._is_printed:
            one = (monotonic() - began) / max(1, epochs - before)
            least, most = (format_remaining(one * max(0, end - epochs)) for end in self._of)
            note(
                f"training will take {least} to {most} more, estimated from its first epoch; it ends when the "
                "predictions for held-out text no longer improve"
            )
            self._is_printed = True


@contextmanager
def _recorded(model: str, engine: EngineOptions, tuned: TuneOptions) -> Iterator[list[Path]]:
    """Yield the traces to which the predictor is fitted: the given ones, or a temporary trace of the model while it
    reads the text."""
    from smoe.cli.record import record
    from smoe.eval.texts import read_documents
    from smoe.generation.sampling_settings import Sampling

    if tuned.trace:
        yield tuned.trace
        return
    texts = read_documents(tuned.text)
    exact = replace(engine, preset="exact", prefetch=None)  # the fitted predictor may not exist yet
    with TemporaryDirectory() as folder:
        path = Path(folder) / "text.trace"
        if record(model, exact, Sampling(), texts, tuned.tokens or _TOKENS, path, force=False)["was_interrupted"]:
            raise KeyboardInterrupt("nothing was stored")
        yield [path]


def _print(found: PredictorTuning) -> None:
    """Print the course of the fitting, and the accuracy of every predictor on every trace, compared with the
    paper's."""
    from smoe.cli.console import print_rows
    from smoe.eval.tune_predictor import PAPER
    from smoe.units import format_bytes, format_seconds

    fitted, training = found.fitted, found.training
    how = ""
    if training is not None:
        took = format_seconds(training.core_seconds)
        how = f", {len(training.losses)} epochs (the best was {training.best_epoch}) in {took} of one core"
    print(f"{fitted.name}: fitted on {fitted.tokens} tokens{how}; {format_bytes(fitted.nbytes)}")
    if not found.rates:
        return
    rows = []
    for name in next(iter(found.rates.values())):
        rates = [of[name] for of in found.rates.values()]
        rows.append([name, *map(_shown, rates), format_seconds(rates[0].seconds)])
    rows += [[name, f"{exact:.1%} / {some:.1%}"] for name, (exact, some) in PAPER.items()]
    print_rows(["all predicted / at least one", *found.rates, "time"], rows, left=1)


def _shown(rates: PredictionRates) -> str:
    return f"{rates.exact:.1%} / {rates.at_least_one:.1%}"
