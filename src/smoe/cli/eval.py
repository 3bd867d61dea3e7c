"""`smoe eval`: what does a lossy option cost, and what does it buy?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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

A line of questions, by how the answer is scored ("short" is the default):

{"prompt": "The sky is", "answer": "blue"} - the first line of the output

{"prompt": "3 + 4 =", "answer": "7", "format": "number"} - the last number

{"prompt": "... A or B?", "answer": "B", "format": "letter"} - the first capital

{"prompt": "Who?", "choices": ["he", "she"], "answer": "B"} - likeliest choice

With "format": "cloze" the likeliest per character; with a "suffix" beside
the choices, the one that makes the suffix likeliest. A is the first choice.

The table goes to stderr; one line of JSON to stdout, unless that is a
terminal (--json: always). Alpha 0 is the model itself, unless --precision
puts its experts in fewer bits (int4), --low-precision those that are missing
and matter little (+int4), or --activations what they multiply (x int8): then
the model itself is measured, too. Ctrl-C and SIGTERM keep the thresholds that
are done, and say where.
"""

TOKENS, MOST_QUESTIONS = 2000, 100
"""The default limits of the text and of the questions."""


def command(
    engine: EngineOptions,
    drafts: RecallOptions,
    model: Model = "demo",
    alphas: Annotated[
        str | None,
        typer.Option(help="Thresholds, separated by commas. \\[default: 0,0.1, ... 0.6; 0 with low copies]"),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="What to predict: .txt, or .jsonl with 'text'. Default: stories.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the text, at most; with --recall, decoded after each prompt. \\[default: 2000, or 256]"
        ),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            help="Questions: .jsonl with 'prompt', 'answer', 'choices' (below). Default for the demo: its own."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm_eval in place of questions, separated by commas (pip install 'smoe\\[lm-eval]')."
        ),
    ] = None,
    task_folder: Annotated[Path | None, typer.Option(help="Folder of your own lm_eval tasks.")] = None,
    most_questions: Annotated[
        int | None,
        typer.Option("--most-questions", help="Questions of each task, at most; 0: none. \\[default: 100]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Store results in this folder, and continue from those in it.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw quality and time against alpha: .png, .svg or .pdf; with --recall a folder."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the quality cost of expert substitution: perplexity, divergence, accuracy and time by threshold.

    Text is read token by token, as in generation, with the cache in the state that it would have. Every threshold reads
    the same tokens; differences from the exact model have intervals of 95 %.

    With --recall: measure how well draft models (copies in fewer bits, decoding alongside) predict the next experts, by
    precision and by how often they are aligned, compared with predictors that need no copy, on the same exact runs.
    """
    if drafts.recall:
        _refuse_prices(alphas=alphas, questions=questions, tasks=tasks, task_folder=task_folder, out=out)
        _refuse_prices(most_questions=most_questions)
        compare_drafts(model, engine, drafts, text, tokens, plot, json)
        return
    drafts.refuse_idle()
    thresholds = _thresholds(alphas) if alphas is not None else _usual_thresholds(engine.config())
    if plot is not None:
        check_plot(plot)
    material = _material(text, tokens, questions, most_questions, tasks, task_folder)
    _price(model, engine, thresholds, material, out, plot, json)


def _material(
    text: Path | None,
    tokens: int | None,
    questions: Path | None,
    most_questions: int | None,
    tasks: str | None,
    task_folder: Path | None,
) -> Material:
    """Return the texts and questions, with defaults for what the user left out."""
    from smoe.cli.prices import Material

    most = MOST_QUESTIONS if most_questions is None else most_questions
    names = _task_names(tasks, task_folder, questions, most)
    return Material(text, TOKENS if tokens is None else tokens, questions, most, names, task_folder)


def _price(
    model: str,
    engine: EngineOptions,
    thresholds: list[float],
    material: Material,
    out: Path | None,
    plot: Path | None,
    json: bool,
) -> None:
    """Measure the quality costs, store and print them."""
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
    """Raise `ConfigError` for options of quality costs, which were not requested."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"`{name}` applies to measurements of quality, and --recall makes none; leave out one of the two",
                setting=name,
                given=str(value),
                allowed="only without `recall`",
            )


def _task_names(
    tasks: str | None, task_folder: Path | None, questions: Path | None, most_questions: int
) -> tuple[str, ...]:
    """Return the tasks of lm_eval; empty where none are requested. Raises `ConfigError` for options that exclude each
    other."""
    if tasks is not None and questions is not None:
        message = "--tasks and --questions both choose the questions; give one of them"
        raise ConfigError(message, setting="tasks", given=tasks, allowed="only without `questions`")
    if task_folder is not None and tasks is None:
        raise ConfigError.idle("task_folder", str(task_folder), "`tasks`")
    if most_questions < (0 if tasks is None else 1):
        allowed = "at least 0" if tasks is None else "at least 1 with `tasks`"
        raise ConfigError.out_of_bounds("most_questions", most_questions, allowed)
    names = tuple(name.strip() for name in tasks.split(",") if name.strip()) if tasks is not None else ()
    if tasks is not None and not names:
        raise ConfigError.out_of_bounds("tasks", tasks, "names of tasks separated by commas, such as arc_easy,piqa")
    return names


def _no_alphas(given: str) -> ConfigError:
    allowed = "numbers from 0 (exact) to 1 separated by commas, such as 0,0.2,0.4"
    return ConfigError.out_of_bounds("alphas", given, allowed)


def _usual_thresholds(config: EngineConfig) -> list[float]:
    """Return the default thresholds: substitution from 0 to 0.6; for low copies only 0, because they have their own
    thresholds."""
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
