"""What `smoe bench --ablation` does: it measures an ablation of a model and prints, draws or writes the results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from bench.mechanisms import ablation
from bench.mechanisms.ablation import ABLATIONS, DEVICE_ABLATIONS, Line, ablate, as_json
from bench.mechanisms.plot import draw
from bench.mechanisms.table import print_table
from smoe.bounds import EMULATED
from smoe.cli.console import gives_json, is_quiet, print_json, progress, warn
from smoe.cli.interrupts import exit_code, print_interrupted
from smoe.cli.options import EngineOptions
from smoe.errors import ConfigError
from smoe.eval.texts import read_documents
from smoe.load.device import choose_device
from smoe.load.pretrained import load
from smoe.load.tokenizer import load_tokenizer
from smoe.models.load_observer import LoadObserver


class _Warned(LoadObserver):
    """Warns if more memory is requested than is free."""

    def short_of_memory(self, message: str) -> None:
        warn(message)


def ablate_model(
    model: str,
    options: EngineOptions,
    name: str,
    text: Path | None,
    amounts: tuple[int | None, int | None, int | None],
    plot: Path | None,
    shows_json: bool,
) -> None:
    """`amounts`: rounds, batch and timed tokens of a turn, each at least 1; None: the default."""
    if name not in ABLATIONS:
        raise ConfigError.no_choice("ablation", name, ABLATIONS)
    rounds, batch, tokens = amounts[0] or 2, amounts[1] or 1, amounts[2] or ablation.TIMED_TOKENS
    config = options.config(batch)
    has_device = config.device == EMULATED or choose_device(config).type != "cpu"
    steps = (DEVICE_ABLATIONS if has_device else ABLATIONS)[name]
    rows = _rows_of_text(model, options, text, batch, tokens)
    if config.context_tokens is None:
        config = replace(config, context_tokens=len(rows[0]))
    with progress("bench", "turns") as bars:
        task = bars.add_task("loading", total=rounds * len(steps), amount="")
        bars.update(task, completed=-1)
        lines = ablate(
            steps,
            rounds,
            config,
            rows,
            lambda wanted: load(model, wanted, options.revision, _Warned()),
            lambda step: bars.update(task, advance=1, description=step.name.strip()),
        )
    if not lines:
        raise KeyboardInterrupt
    if not (gives_json(shows_json) and is_quiet()):
        print_table(lines, has_device, config.device == EMULATED)
    if plot is not None:
        _draw(lines, model, batch, config.profile if config.device == EMULATED else None, plot)
    if gives_json(shows_json):
        asked = {"ablation": name, "model": model, "memory": options.memory, "rounds": rounds, "tokens": tokens}
        print_json(asked | as_json(lines, config, batch))
    done, wanted = sum(len(line.turns) for line in lines), rounds * len(steps)
    if done < wanted:
        print_interrupted(f"{done} of {wanted} rounds were measured")
        raise typer.Exit(exit_code())


def _draw(lines: list[Line], model: str, batch: int, profile: str | None, path: Path) -> None:
    share = lines[0].turns[0].resident_share
    emulated = f", {Path(profile).stem} emulated" if profile is not None else ""
    title = f"{Path(model).name}, {share:.0%} of the experts resident, batch {batch}{emulated}"
    draw([line.as_json() for line in lines], title, path)


def _rows_of_text(model: str, options: EngineOptions, text: Path | None, batch: int, tokens: int) -> list[list[int]]:
    """Stretches of the text, one for each sequence of the batch, in tokens."""
    needed = ablation.PROMPT_TOKENS + ablation.WARM_TOKENS + tokens
    tokenizer = load_tokenizer(model, options.revision)
    ids = [token for document in read_documents(text) for token in tokenizer(document)["input_ids"]]
    if len(ids) < needed * batch:
        source = str(text or "the demo's text")
        raise ConfigError(
            f"{source} has {len(ids)} tokens and {needed * batch} are needed: give a longer --text, or fewer --tokens",
            setting="text",
            given=source,
            allowed=f"text of at least {needed * batch} tokens",
        )
    return [ids[n * needed : (n + 1) * needed] for n in range(batch)]
