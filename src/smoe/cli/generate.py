"""`smoe generate`: continue a prompt, or several."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.libraries import import_libraries
from smoe.cli.options import Debug, EngineOptions, Json, Model, check_text, substituting, warn_of_losses
from smoe.cli.request_options import PromptOptions, SamplingOptions
from smoe.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smoe.cli.summary import RunSetup
    from smoe.generation.detokenizer import OnText
    from smoe.generation.generate import Answer, Generation
    from smoe.generation.sampling_settings import Sampling
    from smoe.report.hindsight import Foretold
    from smoe.report.prompt_layers import PromptLayers
    from smoe.report.run import RunReport

EPILOG = """Examples:

smoe generate

smoe generate -p "Tom had a red ball." --max-new-tokens 200

smoe generate ./my-moe --memory 8GiB -p "The capital of France is" --temperature 0.7 --seed 1

cat question.txt | smoe generate mistralai/Mixtral-8x7B-v0.1 --memory 12GiB --stop "Q:"

smoe generate -p "One day" -p "In the garden" --json

The text goes to stdout, all other output to stderr (--quiet: only
warnings). Ctrl-C and SIGTERM end the text early and still print the summary.
"""

DEMO_PROMPT = "Once upon a time"
_SHORT_PROMPT = 500
_OPEN_SECONDS = 60.0
"""Seconds that a run with `--watch` waits for a browser."""


def command(
    prompts: PromptOptions,
    engine: EngineOptions,
    sampling: SamplingOptions,
    model: Model = "demo",
    tpot: Annotated[
        str | None,
        typer.Option(
            help="LOSSY: use the smallest alpha that meets this time per token, e.g. 80ms; needs smoe tune --tpot."
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Show the run in a browser: which experts are in memory, which are read, and what the time is spent "
            "on. "
            "The address is printed; generation begins when it is opened, or after a minute.",
        ),
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt, within the memory budget.

    The text goes to stdout while it is generated. A summary on stderr shows the speed, how much was read, and how close
    the run came to the limits of this machine.
    """
    from smoe.cli.console import is_quiet, print_json
    from smoe.cli.interrupts import exit_code, print_interrupted

    if watch:
        from smoe.server.installed import check_server

        check_server()
    seconds = _seconds(tpot, engine)
    texts = read_prompts(prompts, model)
    report, setup = _run(model, texts, engine, to_sampling(sampling), seconds, streams=not json, watch=watch)
    if report.generation.was_interrupted:
        print_interrupted()
    if json:
        print_json(_identity(model, sampling) | report.as_json())
    elif not is_quiet():
        from smoe.cli.summary import print_summary

        print_summary(report, setup)
    if report.generation.was_interrupted:
        raise typer.Exit(exit_code())


def read_prompts(options: PromptOptions, model: str) -> list[str]:
    """Return the prompts of the command line, files and stdin, in this order; the demo has a default prompt."""
    from smoe.cli.console import note, stdin

    texts = list(options.prompt or [])
    texts += [_read(name) for name in options.prompt_file or []]
    piped = stdin()
    if not texts and piped is not None and not piped.isatty():
        texts = [text for text in [piped.read()] if text]
        check_text("".join(texts), "stdin")
    if not texts and model == "demo":
        note(f'no prompt was given; using "{DEMO_PROMPT}" (see --prompt)')
        texts = [DEMO_PROMPT]
    if not texts:
        message = 'there is no prompt; give one with -p "...", --prompt-file FILE, or on stdin'
        raise ConfigError(message, setting="prompt", allowed="at least one, or `prompt_file`, or stdin")
    return texts


def to_sampling(options: SamplingOptions) -> Sampling:
    """Return the sampling options as `Sampling`."""
    from smoe.generation.sampling_settings import Sampling

    return Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        stop=tuple(options.stop or ()),
    )


def _seconds(tpot: str | None, engine: EngineOptions) -> float | None:
    """Return the requested time per token in seconds, or None. The time determines alpha, so an explicit alpha is
    refused with a `ConfigError`."""
    from smoe.units import parse_seconds

    if tpot is not None and engine.max_perplexity_increase is not None:
        message = "--tpot sets a time per token and --max-perplexity-increase a quality cost; give only one of them"
        raise ConfigError(message, setting="tpot", given=tpot, allowed="only without `max_perplexity_increase`")
    if tpot is not None and engine.alpha is not None:
        message = "--tpot chooses alpha; give either --tpot or --alpha"
        raise ConfigError(message, setting="alpha", given=engine.alpha, allowed="only without `tpot`")
    if tpot is None:
        return None
    if engine.preset == "exact":
        warn_of_losses(["--tpot"])
    return parse_seconds(tpot, "tpot")


def _meet(seconds: float, model: str, preset: str, ready: PreTrainedModel) -> None:
    """Set the smallest alpha that meets the requested time per token, by the measurements of `smoe tune` and the disk's
    present read rate."""
    from smoe.cli.console import note
    from smoe.eval.tune import circumstances_of, look_at_reading, recall
    from smoe.presets import PRESETS
    from smoe.units import format_bytes_rate, format_seconds

    offload: Any = ready.offload
    tuning, when = recall(circumstances_of(model, offload)), ""
    rate = look_at_reading(ready)
    if rate is not None:
        tuning = tuning.as_first_read(rate)
    if tuning.bytes_per_second is not None:
        how = "just now" if rate is not None else "as at that time"
        when = f", with experts read at {format_bytes_rate(tuning.bytes_per_second)} {how}"
    alpha = tuning.alpha_for(seconds)
    offload.use_alpha(alpha)
    usual = PRESETS[preset].get("alpha", alpha)
    instead = f", instead of the preset's {usual:g}" if usual != alpha else ""
    note(
        f"alpha is {alpha:g}: by the measurements of smoe tune, the smallest alpha that meets "
        f"{format_seconds(seconds)} a token{when}{instead}"
    )


def _run(
    model: str,
    texts: list[str],
    engine: EngineOptions,
    sampling: Sampling,
    tpot: float | None,
    *,
    streams: bool,
    watch: bool,
) -> tuple[RunReport, RunSetup]:
    """Generate, and return the report and the engine's setup for the summary."""
    from smoe.cli.console import Patience, warn

    config = engine.config(len(texts))
    if tpot is not None and config.prices_answers:
        config, tpot = replace(config, max_perplexity_increase=None, tpot_seconds=tpot), None
    elif tpot is not None:
        config = substituting(engine, len(texts))
    from smoe.report.early_refusal import refuse_empty_prompts

    refuse_empty_prompts(model, texts)
    import_libraries(model, config)
    from smoe.cli.session import loaded_with_tokenizer
    from smoe.cli.summary import setup_of
    from smoe.generation.generate import generate
    from smoe.report.prompt_layers import PromptLayers
    from smoe.report.run import report_on

    most = sampling.max_new_tokens
    with (
        loaded_with_tokenizer(model, config, engine.revision, None, texts, most, describes=not streams) as (
            ready,
            tokenizer,
        ),
        _shown(ready, model, texts, watch) as say,
    ):
        if tpot is not None:
            _meet(tpot, model, engine.preset or "exact", ready)
        if streams:
            _show_prompt(texts)
        bar = Patience("reading the prompt" if len(texts) == 1 and streams else "generating")
        bar.start()
        try:
            writer = _after(bar.stop, _writer(len(texts)), say) if streams else say
            offload: Any = ready.offload
            layers = PromptLayers(offload)
            with offload.observed_by(layers):
                generation = generate(ready, tokenizer, texts, sampling, writer)
        finally:
            bar.stop()
        if streams:
            _finish(generation.answers if len(texts) > 1 else [])
        for text in generation.notes:
            warn(text)
        report = report_on(generation, ready)
        if not generation.was_interrupted:  # after an interrupt, the command should end without another second of work
            report = replace(report, forecast=_foretold(model, engine.revision, ready, generation, layers))
        return report, setup_of(offload, has_template=tokenizer.chat_template is not None)


def _foretold(
    model: str, revision: str | None, ready: PreTrainedModel, generation: Generation, layers: PromptLayers
) -> Foretold | None:
    """Return the forecast with which the summary compares the run, and store the run's times for later forecasts."""
    from smoe.cli.console import doing
    from smoe.models.files import fetch

    with doing("comparing the run with its forecast"):
        from smoe.report.hindsight import look_back  # imports the simulator, after the text is printed

        return look_back(ready, generation, fetch(model, revision), layers)


def _identity(model: str, sampling: SamplingOptions) -> dict[str, object]:
    return {"model": model, "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}


def _show_prompt(texts: list[str]) -> None:
    """Print a short prompt before its continuation, if the output is a terminal. The prompt goes to stderr, because
    stdout gets only the new text."""
    from smoe.cli.console import errors, is_quiet

    if is_quiet():
        return
    if len(texts) == 1 and len(texts[0]) <= _SHORT_PROMPT and sys.stdout.isatty() and sys.stderr.isatty():
        errors().print(texts[0], style="dim", end="", markup=False, soft_wrap=True)


def _writer(prompts: int) -> OnText | None:
    """Return a function that writes new text to stdout. None for several texts, which are printed when all have
    ended."""
    if prompts > 1:
        return None

    def write(row: int, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return write


def _after(stop: Callable[[], None], write: OnText | None, say: OnText | None) -> OnText | None:
    """Return a function that writes text to stdout and to the browser page. It first removes the progress bar."""

    def write_after(row: int, text: str) -> None:
        if write is not None:
            stop()
            write(row, text)
        if say is not None:
            say(row, text)

    return None if write is None and say is None else write_after


@contextmanager
def _shown(ready: PreTrainedModel, model: str, texts: list[str], watch: bool) -> Iterator[OnText | None]:
    """If requested, show the run on the browser page during the `with` block, which begins when a browser opens the
    page. Yield a function that passes text to the page."""
    if not watch:
        yield None
        return
    from smoe.cli.console import note
    from smoe.server.run_page import shown

    engine: Any = ready.offload
    with shown(engine, model) as page:
        note(
            f"generation begins when {page.address} is opened in a browser, or after {_OPEN_SECONDS:.0f} s",
            is_asked=True,
        )
        page.wait(_OPEN_SECONDS)
        is_single = len(texts) == 1
        if is_single:
            page.say(texts[0])
        yield (lambda row, text: page.say(text)) if is_single else None


def _finish(answers: list[Answer]) -> None:
    """Print the texts that were not written while they were generated, and end the last line."""
    for number, answer in enumerate(answers, start=1):
        sys.stdout.write(f"[{number}] {answer.text}\n" + ("\n" if number < len(answers) else ""))
    if not answers:
        sys.stdout.write("\n")
    sys.stdout.flush()


def _read(name: str) -> str:
    from smoe.eval.texts import unread

    if name == "-":
        from smoe.cli.console import stdin

        piped = stdin()
        if piped is None:
            message = "--prompt-file - reads stdin, and stdin is closed; give a file, or use -p"
            raise ConfigError(message, setting="prompt_file", given="-", allowed="a file, as stdin is closed")
        text = piped.read()
        check_text(text, "stdin")
        return text
    try:
        return Path(name).read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise unread(Path(name), "prompt_file", error) from error
