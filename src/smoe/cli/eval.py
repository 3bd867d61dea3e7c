"""`smoe eval`: measures the quality cost and the speed of lossy options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoe.cli.libraries import import_libraries
from smoe.cli.options import Debug, EngineOptions, Json, Model
from smoe.cli.plot_file import check_plot
from smoe.cli.recall import RecallOptions, compare_drafts
from smoe.config import EngineConfig
from smoe.errors import ConfigError

if TYPE_CHECKING:
    from smoe.cli.prices import Material

EPILOG = """Examples:

smoe eval --memory 24MiB

smoe eval ./my-moe --memory 8GiB --text book.txt --alphas 0,0.2,0.4 --plot price.png

smoe eval ./my-moe --memory 8GiB --questions qa.jsonl --out results     (continues an interrupted run)

smoe eval ./my-moe --memory 8GiB --precision int4 --alphas 0     (after: smoe pack ./my-moe --precision int4)

smoe eval ./my-moe --memory 8GiB --preset hobbit     (after the same)

smoe eval model.gguf --memory 8GiB --activations int8 --alphas 0

smoe eval ./my-moe --memory 8GiB --tasks arc_easy,piqa --most-questions 50

smoe eval ./my-moe --recall --draft int8,int4 --periods 0,1,16     (after: smoe pack ./my-moe --precision int8,int4)

A file of questions has one JSON object per line. "format" says how an answer
is scored ("short" is the default):

{"prompt": "The sky is", "answer": "blue"} - the first line of the output

{"prompt": "3 + 4 =", "answer": "7", "format": "number"} - the last number

{"prompt": "... A or B?", "answer": "B", "format": "letter"} - the first capital

{"prompt": "Who?", "choices": ["he", "she"], "answer": "B"} - likeliest choice

With choices, the answer is a letter, and A is the first choice. With
"format": "cloze", the choice with the highest probability per character
counts; if the line also has a "suffix", the choice counts that makes the
suffix most probable.

The table goes to stderr. If stdout is not a terminal, or with --json, one
line of JSON goes to stdout. Each setting is compared with the exact model:
alpha 0. If --precision, --low-precision or --activations changes the model
even with alpha 0, the exact model is measured in addition; the table calls
the changed model int4, +int4 or x int8. After Ctrl-C or SIGTERM the finished
results stay, and a message says where they are.
"""

_PANEL = "Questions"
TOKENS, MOST_QUESTIONS = 2000, 100
"""The default limits: the number of tokens of the text, and the number of questions."""


@dataclass(frozen=True)
class QuestionOptions:
    """The options of `smoe eval` that choose the questions to ask."""

    questions: Annotated[
        Path | None,
        typer.Option(
            help="File of questions, .jsonl, described below. Default: questions of the demo for the demo, else none.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm_eval to ask instead of --questions, separated by commas (pip install lm_eval).",
            rich_help_panel=_PANEL,
        ),
    ] = None
    task_folder: Annotated[
        Path | None,
        typer.Option(help="With --tasks: a folder with lm_eval tasks of your own.", rich_help_panel=_PANEL),
    ] = None
    most_questions: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of questions that are asked, for each task with --tasks; 0: none. \\[default: 100]",
            rich_help_panel=_PANEL,
        ),
    ] = None

    @property
    def most(self) -> int:
        """The maximum number of questions, for each task with `tasks`."""
        return MOST_QUESTIONS if self.most_questions is None else self.most_questions

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of the tasks of lm_eval; empty if none are requested.

        Raises `ConfigError` for options that exclude each other.
        """
        if self.tasks is not None and self.questions is not None:
            message = "--tasks and --questions both choose the questions; give one of them"
            raise ConfigError(message, setting="tasks", given=self.tasks, allowed="only without `questions`")
        if self.task_folder is not None and self.tasks is None:
            raise ConfigError.idle("task_folder", str(self.task_folder), "`tasks`")
        if self.most < (0 if self.tasks is None else 1):
            allowed = "at least 0" if self.tasks is None else "at least 1 with `tasks`"
            raise ConfigError.out_of_bounds("most_questions", self.most, allowed)
        names = tuple(name.strip() for name in (self.tasks or "").split(",") if name.strip())
        if self.tasks is not None and not names:
            allowed = "names of tasks separated by commas, such as arc_easy,piqa"
            raise ConfigError.out_of_bounds("tasks", self.tasks, allowed)
        return names


def command(
    engine: EngineOptions,
    drafts: RecallOptions,
    asked: QuestionOptions,
    model: Model = "demo",
    alphas: Annotated[
        str | None,
        typer.Option(
            help="Values of --alpha to measure, separated by commas. \\[default: 0,0.1, ... 0.6; with "
            "--low-precision: 0]"
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="File with the text to measure on: .txt, or .jsonl with 'text'. Default: stories."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens of the text that are measured; with --recall: number of tokens that are "
            "decoded after each prompt. \\[default: 2000; with --recall: 256]"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Store results in this folder, and continue from those in it.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="File for a picture of quality and time by alpha: .png, .svg or .pdf; with --recall: a folder."
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the quality cost of expert substitution: perplexity, divergence, accuracy and time for each alpha.

    Text is read token by token, with experts in memory as they would be in generation. Every alpha reads the same
    tokens (--tokens) and answers the same questions; for demo these are 100 questions of its own, unless
    --most-questions sets another number. Differences from the exact model have intervals of 95 %.

    With --recall: measure how many of the next experts draft models predict. Draft models are copies of the model in
    fewer bits that decode the same text. The table compares precisions, how often a draft model takes over the model's
    tokens, and predictors that need no copy.
    """
    if drafts.recall:
        _refuse_prices(alphas=alphas, out=out, **vars(asked))
        compare_drafts(model, engine, drafts, text, tokens, plot, json)
        return
    drafts.refuse_idle()
    thresholds = _thresholds(alphas) if alphas is not None else _usual_thresholds(engine.config())
    if plot is not None:
        check_plot(plot)
    import_libraries(model, engine.config())
    material = _material(text, tokens, asked)
    _price(model, engine, thresholds, material, out, plot, json)


def _material(text: Path | None, tokens: int | None, asked: QuestionOptions) -> Material:
    """Return the texts and questions on which quality is measured: the given ones, or the defaults."""
    from smoe.cli.prices import Material

    count, names = TOKENS if tokens is None else tokens, asked.task_names
    return Material(text, count, asked.questions, asked.most, names, asked.task_folder)


def _price(
    model: str,
    engine: EngineOptions,
    thresholds: list[float],
    material: Material,
    out: Path | None,
    plot: Path | None,
    json: bool,
) -> None:
    """Measure the quality costs of the requested thresholds. Store and print them."""
    from smoe.cli.console import gives_json, is_quiet, note, print_json
    from smoe.cli.prices import measured, print_table

    prices, circumstances = measured(engine, model, thresholds, material, out)
    writes_json = gives_json(json)
    if not (writes_json and is_quiet()):
        print_table(prices)
    if writes_json:
        print_json(circumstances | {"prices": [price.as_json() for price in prices]})
    if plot is not None:
        from smoe.eval.plot import draw

        asked = prices[-1].quality.numbers
        priced = [price for price in prices if price.quality.numbers == asked]
        draw(priced, f"{model}, {circumstances['resident_share']:.0%} of the experts resident", plot)
        note(str(plot))


def _refuse_prices(**given: object) -> None:
    """Raise `ConfigError` if options for measuring quality costs are given for a command that does not measure them."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"`{name}` applies to measurements of quality, and --recall makes no such measurement; leave out "
                f"`{name}` or --recall",
                setting=name,
                given=str(value),
                allowed="only without `recall`",
            )


def _no_alphas(given: str) -> ConfigError:
    allowed = "numbers from 0 (exact) to 1 separated by commas, such as 0,0.2,0.4"
    return ConfigError.out_of_bounds("alphas", given, allowed)


def _usual_thresholds(config: EngineConfig) -> list[float]:
    """Return the default values of alpha: 0 to 0.6 in steps of 0.1. With low-precision copies only 0, because they have
    thresholds of their own."""
    by_importance = config.has_low or config.skip_threshold < 1
    return [0.0] if by_importance or config.prices_answers else [n / 10 for n in range(7)]


def _thresholds(given: str) -> list[float]:
    try:
        found = [float(part) for part in given.split(",")]
    except ValueError as error:
        raise _no_alphas(given) from error
    if not all(0 <= alpha <= 1 for alpha in found):
        raise _no_alphas(given)
    return found
