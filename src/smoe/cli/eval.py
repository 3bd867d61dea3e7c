"""`smoe eval`: what does a lossy option cost, and what does it buy?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.options import Debug, EngineOptions, Model, check_plot, substituting

if TYPE_CHECKING:
    from smoe.eval.price import Change, Price

_TABLE_WIDTH = 80
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
_LEGEND = """change: interval of 95 % of the difference from alpha 0; KL, top 1: next token's
distribution and likeliest token against alpha 0's; hits: experts in memory"""
_LEAST_SAMPLES = 10
"""Blocks of tokens, or questions: fewer say nothing about the uncertainty."""

EPILOG = """Examples:

smoe eval --memory 24MiB

smoe eval ./my-moe --memory 8GiB --text book.txt --alphas 0,0.2,0.4 --plot price.png

smoe eval ./my-moe --memory 8GiB --questions qa.jsonl --out results     (goes on where it was interrupted)

The table goes to stderr; stdout gets one line of JSON. Alpha 0 is the model itself.
"""


def command(
    engine: EngineOptions,
    model: Model = "demo",
    alphas: Annotated[str, typer.Option(help="Thresholds, separated by commas.")] = "0,0.1,0.2,0.3,0.4,0.5,0.6",
    text: Annotated[
        Path | None, typer.Option(help="What to predict: .txt, or .jsonl with 'text'. Default: stories.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of it, at most.")] = 2000,
    questions: Annotated[
        Path | None, typer.Option(help="Questions: .jsonl with 'prompt' and 'answer'. Default for the demo: its own.")
    ] = None,
    most_questions: Annotated[int, typer.Option("--most-questions", help="Questions asked, at most; 0: none.")] = 100,
    out: Annotated[Path | None, typer.Option(help="Keep results here, and go on from what is there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw quality and time against alpha: .png, .svg or .pdf.")] = None,
    debug: Debug = False,
) -> None:
    """Price the substitution of experts: perplexity, divergence, accuracy and time per token for each threshold.

    Token by token, as in generation, with the cache in its true state; every threshold on the same tokens, with the
    interval of 95 % of the difference from the exact model.
    """
    import tempfile

    from smoe.cli.console import note, print_json

    thresholds = _thresholds(alphas)
    if plot is not None:
        check_plot(plot)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = out or Path(scratch)
            prices, circumstances = _measure(engine, model, thresholds, text, tokens, questions, most_questions, folder)
    except KeyboardInterrupt:
        kept = (
            f"what was measured is in {out}; the same command goes on from there"
            if out
            else "nothing was kept; --out would keep it"
        )
        note(f"interrupted; {kept}")
        raise typer.Exit(130) from None
    _print_table(prices)
    print_json(circumstances | {"prices": [price.as_json() for price in prices]})
    if plot is not None:
        from smoe.eval.plot import draw

        draw(prices, f"{model}, {circumstances['resident_share']:.0%} of the experts resident", plot)
        note(str(plot))


def _thresholds(given: str) -> list[float]:
    from smoe.config import configure
    from smoe.errors import ConfigError

    try:
        found = [float(part) for part in given.split(",")]
    except ValueError as error:
        raise ConfigError(f"--alphas is {given!r}; give numbers separated by commas, such as 0,0.2,0.4") from error
    for alpha in found:
        configure(alpha=alpha)  # complains where it is out of bounds
    return found


def _measure(
    options: EngineOptions,
    model: str,
    thresholds: list[float],
    text: Path | None,
    tokens: int,
    questions: Path | None,
    most_questions: int,
    folder: Path,
) -> tuple[list[Price], dict[str, Any]]:
    from dataclasses import replace

    from smoe.cli.session import loaded, tokenizer_of
    from smoe.errors import ConfigError
    from smoe.eval.price import sweep
    from smoe.eval.texts import read_documents, read_questions

    if tokens < 2:
        raise ConfigError(f"--tokens is {tokens}; at least 2 are needed to predict one")
    texts = read_documents(text)
    asked = read_questions(questions)[:most_questions] if most_questions and (questions or model == "demo") else []
    config = replace(substituting(options), alpha=max(thresholds))  # so that the router's rule is proven
    tokenizer = tokenizer_of(model, options.revision)
    with loaded(model, config, options.revision) as ready:
        offload: Any = ready.offload
        documents = _cut(tokenizer, texts, tokens, offload.context_tokens)
        if not documents:
            raise ConfigError("the text has no two tokens in a row; give a longer one with --text")
        circumstances = {
            "model": model,
            "memory_budget_bytes": offload.ledger.budget_bytes,
            "slots": offload.ledger.cache_slots,
            "resident_share": offload.ledger.resident_share,
            "eviction": config.eviction,
            "prefetch": config.prefetch,
            "substitutes": config.substitutes,
            "substitute_weights": config.substitute_weights,
            "text": str(text) if text else "stories of the demo",
            "text_tokens": sum(map(len, documents)) - len(documents),
            "questions_from": str(questions) if questions else "the demo" if asked else None,
            "questions": len(asked),
        }
        with _Bars(thresholds, sum(map(len, documents)), len(asked)) as bars:
            return sweep(
                ready, tokenizer, thresholds, documents, asked, folder, circumstances, bars.start
            ), circumstances


def _cut(tokenizer: Any, texts: list[str], tokens: int, context: int) -> list[list[int]]:
    """Token ids of the documents, each cut at the context, all together at `tokens` predictions."""
    documents: list[list[int]] = []
    for text in texts:
        ids = tokenizer(text)["input_ids"][: min(context, tokens + 1)]
        if len(ids) > 1:
            documents.append(ids)
            tokens -= len(ids) - 1
        if tokens < 1:
            break
    return documents


class _Bars:
    """A bar for every threshold; the length of answers is not known before, so it is a guess."""

    def __init__(self, thresholds: list[float], text_tokens: int, questions: int) -> None:
        from smoe.cli.console import progress

        self._progress = progress("eval", "tokens")
        self._alphas = sorted({0.0, *thresholds})
        self._expected = text_tokens + questions * 40

    def __enter__(self) -> _Bars:
        self._bars = self._progress.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._progress.__exit__(*exc)

    def start(self, alpha: float) -> Any:
        title = f"alpha {alpha:g} ({self._alphas.index(alpha) + 1} of {len(self._alphas)})"
        task = self._bars.add_task(title, total=self._expected, amount="")
        return lambda count: self._bars.update(task, advance=count)


def _print_table(prices: list[Price]) -> None:
    from rich.table import Table

    from smoe.cli.console import errors, note

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
        f"{quality.alpha:g}",
        f"{quality.perplexity:.2f}",
        _interval(price.perplexity, len(quality.block_nats)),
        f"{quality.kl:.4f}",
        f"{100 * quality.top1_agreement:.1f}",
        f"{100 * quality.accuracy:.1f}" if quality.accuracy is not None else "-",
        _interval(price.accuracy, len(quality.right)),
        f"{100 * quality.substituted:.1f}",
        f"{100 * quality.hit_ratio:.1f}",
        _milliseconds(quality.median_seconds),
    ]


def _interval(change: Change | None, samples: int) -> str:
    if change is None:
        return "-"
    return f"{_signed(100 * change.low)}..{_signed(100 * change.high)}" if samples >= _LEAST_SAMPLES else "too few"


def _signed(value: float) -> str:
    """A tenth matters below ten only, and would make the table too wide above."""
    return f"{value:+.1f}" if abs(value) < 9.95 else f"{value:+.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
