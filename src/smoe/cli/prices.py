"""Measures the quality cost of several alphas for a command, and shows the text, a progress bar for each alpha, and a
table."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from smoe.bounds import AS_DTYPE, AUTO
from smoe.cli.console import doing, errors, note, progress, warn
from smoe.cli.libraries import reading
from smoe.cli.options import EngineOptions, substituting
from smoe.cli.session import loaded
from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.eval.paired_bootstrap import Change
from smoe.eval.price import RESULTS, Price, sweep
from smoe.eval.questions import Question, Questions, fitting, read_questions
from smoe.eval.stepwise import EXACT, Exam, Numbers, Quality, numbers_of
from smoe.eval.texts import read_documents
from smoe.load.tokenizer import load_tokenizer
from smoe.presets import without_low_copies
from smoe.units import format_count

_TABLE_WIDTH = 80
_QUESTION_TOKENS = 40
"""An estimate of the number of tokens of a question and its answer."""
_HEADS = (
    "alpha\n",
    "perplexity\n",
    "change\n%",
    "KL\nnats",
    "top 1\n%",
    "right\n%",
    "change\npoints",
    "replaced\n%",
    "hits\n%",
    "TPOT\nms",
)
_LEGEND = """change: 95 % interval of the difference from the exact model; KL: divergence of
the next token's distribution from the exact model's; top 1: how often both have
the same likeliest token; replaced: share of chosen experts that a substitute
or low-precision copy replaced, or that were dropped; hits: share in memory"""


@dataclass(frozen=True)
class Material:
    """The texts and questions on which quality costs are measured."""

    text: Path | None
    """The text; None: the demo's stories."""
    tokens: int
    """The largest number of tokens of the text that are used."""
    questions: Path | None = None
    """The questions; None: the demo's own for the demo, none for other models."""
    most_questions: int = 0
    tasks: tuple[str, ...] = ()
    """The tasks of the evaluation harness that replace questions; `most_questions` limits the questions of each."""
    task_folder: Path | None = None
    """A folder with descriptions of the user's own tasks."""
    least_tokens: int = 2
    """The smallest number of tokens that gives a meaningful result."""


def measured(
    engine: EngineOptions, model: str, thresholds: list[float], material: Material, out: Path | None
) -> tuple[list[Price], dict[str, Any]]:
    """Return the quality cost of every alpha, and the circumstances of the measurement.

    After an interrupt, the results of finished alphas remain in `out`, or in a temporary folder. A message names the
    folder, and the interrupt is raised again.
    """
    if out is not None:
        _make_folder(out)
    folder = out or Path(tempfile.mkdtemp(prefix="smoe-eval-"))
    is_done = False
    try:
        found = _measure(engine, model, thresholds, material, folder)
        is_done = True
        return found
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_what_is_stored(folder, out)) from None
    except Exception:
        if (folder / RESULTS).exists():
            warn(_what_is_stored(folder, out))
        raise
    finally:
        if out is None and (is_done or not (folder / RESULTS).exists()):
            shutil.rmtree(folder, ignore_errors=True)


def _what_is_stored(folder: Path, out: Path | None) -> str:
    if not (folder / RESULTS).exists():
        return "no threshold was finished, so nothing is stored"
    how = "the same command" if out is not None else f"the same command with --out {folder}"
    return f"what was measured is in {folder}; {how} continues from there"


def _make_folder(out: Path) -> None:
    """Create the folder for results. Raises `ConfigError` if it cannot be written; called before hours of
    measurements."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        message = f"--out is {str(out)!r}, where no results can be stored: {error.strerror}; give a folder"
        raise ConfigError(
            message, setting="out", given=str(out), allowed="a folder that exists or can be created"
        ) from error


def _measure(
    options: EngineOptions, model: str, thresholds: list[float], material: Material, folder: Path
) -> tuple[list[Price], dict[str, Any]]:
    least, most = material.least_tokens, material.most_questions
    if material.tokens < least:
        raise ConfigError.out_of_bounds("tokens", material.tokens, f"at least {least}")
    texts = read_documents(material.text)
    harness = _harness(material) if material.tasks else None
    has_questions = harness is None and most > 0 and (material.questions is not None or model == "demo")
    asked = read_questions(material.questions)[:most] if has_questions else []
    config = options.config()
    if not config.prices_answers:
        config = replace(substituting(options), alpha=max(thresholds))  # so that the router's rule is tested
    elif thresholds != [0.0]:
        raise ConfigError(
            "--max-perplexity-increase and --tpot choose how each miss is resolved, and use no alpha; leave out "
            "--alphas",
            setting="alphas",
            given=",".join(map(str, thresholds)),
            allowed="0 with `max_perplexity_increase`",
        )
    with reading("tokenizer", model):
        tokenizer = load_tokenizer(model, options.revision)
    prices: list[Price] = []
    found: dict[str, Any] = {}
    in_memory: dict[str, Any] = {}
    for choice, alphas in _in_turn(config, thresholds):
        with loaded(model, replace(choice, **in_memory), options.revision) as ready:
            offload: Any = ready.offload
            numbers = numbers_of(offload.config)
            with doing("reading the text"):
                documents = _documents(tokenizer, texts, material, offload.context_tokens)
            tokens = sum(map(len, documents))
            asked = _fitting(asked, tokenizer, offload.context_tokens)
            circumstances = _circumstances(model, config, material, offload.ledger.budget_bytes) | {
                "text_tokens": tokens - len(documents),
                "questions_from": (str(material.questions) if material.questions else "the demo") if asked else None,
                "questions": len(asked),
            }
            if not prices:
                note(_what_is_measured(thresholds, tokens - len(documents), len(asked), material))
            exam: Exam | None = harness or (Questions(asked) if asked else None)
            with _Bar(numbers, alphas, tokens, len(asked) or most * len(material.tasks)) as bar:
                prices += sweep(ready, tokenizer, alphas, documents, exam, folder, circumstances, bar.start)
            ledger = offload.ledger
            resident = {"slots": ledger.cache_slots, "resident_share": ledger.resident_share}
            found = circumstances | {**numbers._asdict(), **resident}
            # all choices in the same memory budget
            in_memory = {"memory_bytes": ledger.budget_bytes, "resident_share": None}
    return prices, found


def _in_turn(config: EngineConfig, thresholds: list[float]) -> list[tuple[EngineConfig, list[float]]]:
    """Return (configuration, alpha) of each measurement, in order. The exact model, with which all others are compared,
    comes first. Then one lossy setting after the other is added, so that the table shows the effect of each."""
    if config.activations == AUTO:  # what choices cost is measured without rounding that was not asked for
        config = replace(config, activations=AS_DTYPE)
    whole = replace(without_low_copies(config), max_perplexity_increase=None, tpot_seconds=None)
    plain = replace(whole, activations=AS_DTYPE)
    steps = list(dict.fromkeys([replace(plain, precision=EXACT.precision), plain, whole, config]))
    return [*((step, [0.0]) for step in steps[:-1]), (steps[-1], thresholds)]


def _what_is_measured(thresholds: list[float], text_tokens: int, questions: int, material: Material) -> str:
    """Return in words what is computed for each alpha. Questions can take more time than the text."""
    parts = [f"{text_tokens:,} tokens of {material.text or 'stories of the demo'}"]
    if material.tasks:
        parts.append(f"up to {material.most_questions} questions of each task ({', '.join(material.tasks)})")
    elif questions:
        which = "" if material.questions else " of the demo"
        without = "" if material.questions else "; --most-questions 0 leaves the questions out"
        parts.append(f"{format_count(questions, 'question')}{which}, with some {_QUESTION_TOKENS} tokens each{without}")
    alphas = ", ".join(f"{alpha:g}" for alpha in sorted({0.0, *thresholds}))
    return f"for each alpha ({alphas}), the model computes {' and '.join(parts)}"


def _circumstances(model: str, config: EngineConfig, material: Material, budget_bytes: int) -> dict[str, Any]:
    """Return the circumstances of a measurement, such as model, text and settings. Results with equal circumstances can
    be compared."""
    return {
        "model": model,
        "memory_budget_bytes": budget_bytes,
        "eviction": config.eviction,
        "prefetch": config.prefetch,
        "substitutes": config.substitutes,
        "substitute_weights": config.substitute_weights,
        "text": str(material.text) if material.text else "stories of the demo",
        "tasks": list(material.tasks),
        "most_questions": material.most_questions,
    }


def _documents(tokenizer: Any, texts: list[str], material: Material, context_tokens: int) -> list[list[int]]:
    """Return the documents' token ids. Raises `ConfigError` if the documents have too few tokens."""
    documents, least = _cut(tokenizer, texts, material.tokens, context_tokens), material.least_tokens
    tokens = sum(map(len, documents))
    if tokens < least:
        source = str(material.text or "the demo's text")
        message = f"{source} has {tokens} tokens, and needs at least {least}; give a longer --text"
        raise ConfigError(message, setting="text", given=source, allowed=f"text of at least {least} tokens")
    return documents


def _harness(material: Material) -> Exam:
    try:
        from smoe.eval.harness import Harness
    except ImportError as error:
        message = f"--tasks needs the evaluation harness: pip install lm_eval ({error})"
        raise ConfigError(
            message, setting="tasks", given=",".join(material.tasks), allowed="only with lm_eval installed"
        ) from error
    return Harness(material.tasks, material.task_folder, material.most_questions)


def _fitting(asked: list[Question], tokenizer: Any, context_tokens: int) -> list[Question]:
    """Return the questions that fit into the context, and warn about questions that do not."""
    possible = fitting(asked, tokenizer, context_tokens)
    if asked and not possible:
        message = f"no question fits in the context of {context_tokens} tokens; raise --context"
        raise ConfigError(
            message, setting="context_tokens", given=context_tokens, allowed="more, as the questions are longer"
        )
    if len(possible) < len(asked):
        left_out = len(asked) - len(possible)
        warn(
            f"{left_out} of {len(asked)} questions are skipped, because they leave no room for an answer in the "
            f"context of {context_tokens} tokens; raise `context_tokens` to ask all questions"
        )
    return possible


def _cut(tokenizer: Any, texts: list[str], tokens: int, context: int) -> list[list[int]]:
    """Return the documents' token ids, each document cut at the context length, with `tokens` predictions in total."""
    documents: list[list[int]] = []
    for text in texts:
        ids = tokenizer(text)["input_ids"][: min(context, tokens + 1)]
        if len(ids) > 1:
            documents.append(ids)
            tokens -= len(ids) - 1
        if tokens < 1:
            break
    return documents


class _Bar:
    """One progress bar for the measurements of all alphas. The total is estimated, because the length of answers is
    unknown."""

    def __init__(self, numbers: Numbers, thresholds: list[float], text_tokens: int, questions: int) -> None:
        self._progress = progress("eval", "tokens")
        self._in_numbers = f"{numbers}, " if str(numbers) else ""
        self._alphas = sorted({0.0, *thresholds})
        self._each = text_tokens + questions * _QUESTION_TOKENS
        self._started = 0

    def __enter__(self) -> _Bar:
        self._bars = self._progress.__enter__()
        self._task = self._bars.add_task("measuring", total=len(self._alphas) * self._each, amount="")
        return self

    def __exit__(self, *exc: Any) -> None:
        self._progress.__exit__(*exc)

    def start(self, alpha: float) -> Any:
        number = self._alphas.index(alpha)
        title = f"measuring {self._in_numbers}alpha {alpha:g} ({number + 1} of {len(self._alphas)})"
        # the rest was measured in an earlier run and took no time of this one
        skipped = (number - self._started) * self._each
        self._started += 1
        self._bars.update(self._task, description=title, completed=number * self._each, skipped=skipped)
        return lambda count: self._bars.update(self._task, advance=count)


def print_table(prices: list[Price]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for head in _HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for price in prices:
        table.add_row(*_row(price))
    console = errors()
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(table)
    note(_LEGEND)


def _row(price: Price) -> list[str]:
    quality = price.quality
    return [
        _label(quality),
        f"{quality.perplexity:.2f}",
        _interval(None if price.is_base else price.perplexity, price.has_enough_tokens),
        f"{quality.kl:.4f}",
        f"{100 * quality.top1_agreement:.1f}",
        f"{100 * quality.accuracy:.1f}" if quality.accuracy is not None else "-",
        _interval(None if price.is_base else price.accuracy, price.has_enough_questions),
        f"{100 * (quality.substituted + quality.low_served + quality.left_out):.1f}",
        f"{100 * quality.hit_ratio:.1f}",
        _milliseconds(quality.median_seconds),
    ]


def _label(quality: Quality) -> str:
    """Return the name of a table's row: the settings that were measured. With low-precision copies an alpha of 0 is
    left out, to make the table narrow."""
    numbers = str(quality.numbers)
    return numbers if quality.low and not quality.alpha else f"{numbers} {quality.alpha:g}".lstrip()


def _interval(change: Change | None, is_enough: bool) -> str:
    if change is None:
        return "-"
    return f"{_signed(100 * change.low)}..{_signed(100 * change.high)}" if is_enough else "too few"


def _signed(value: float) -> str:
    """Return a difference with its sign as text. Numbers below ten have one decimal; larger numbers have none, to make
    the table narrow."""
    return f"{value:+.1f}" if abs(value) < 9.95 else f"{value:+.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
