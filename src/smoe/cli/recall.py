"""`smoe eval --recall`: measures how well a draft model in fewer bits predicts the experts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.bounds import DTYPES, PRECISION
from smoe.cli.libraries import import_libraries, reading
from smoe.cli.options import EngineOptions
from smoe.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smoe.config import EngineConfig
    from smoe.eval.draft_recall import RecallComparison
    from smoe.eval.recall import Recall
    from smoe.models.spec import LibrarySpec
    from smoe.runtime.draft_model import Alignment

TOKENS = 256
"""The default number of tokens decoded after each prompt: as many as most of the paper's runs."""
_DRAFTS, _PERIODS, _PROMPTS, _PROMPT_TOKENS = "int8,int4", "0,1,4,16", 8, 40
_MOST_PERIOD = 1 << 20
_PANEL = "Recall of draft models (OD-MoE)"
_PICTURES = ("recall-by-token.png", "recall-by-periods.png")
_HEADS = (
    "draft",
    "token\nset",
    "KV\nset",
    "experts\n%",
    "layers\n%",
    "1 more:\nexperts",
    "1 more:\nlayers",
    "next\n%",
)
_LEGEND = """token set, KV set: after how many tokens the draft model takes over the
model's last token, and its keys and values (T and KV of --periods; 0: never;
else for the first time at the first token after the prompt). experts: share of
the chosen experts that were predicted. layers: share of layers all of whose
experts were predicted. 1 more: the same if one expert more is predicted than a
layer chooses. next: how often the draft model predicts the next token. The
shares of predictors leave out the first layers, which they cannot predict."""


@dataclass(frozen=True)
class RecallOptions:
    """The options of `smoe eval --recall`."""

    recall: Annotated[
        bool,
        typer.Option(
            "--recall",
            help="Instead of quality, measure how many experts a draft model predicts: a quantised copy of the model "
            "that decodes the same text.",
            rich_help_panel=_PANEL,
        ),
    ] = False
    draft: Annotated[
        str | None,
        typer.Option(
            help=f"Precisions of the draft models to measure, separated by commas: {', '.join(PRECISION[1:])} (which "
            "smoe "
            f"pack --precision must have written), {', '.join(DTYPES)}. All draft models are in memory at the same "
            "time. "
            f"\\[default: {_DRAFTS}]",
            rich_help_panel=_PANEL,
        ),
    ] = None
    periods: Annotated[
        str | None,
        typer.Option(
            help="Periods to compare, separated by commas. T1KV16: the draft model gets the model's latest token after "
            "every token (T1), and a copy of the model's keys and values after every 16th token (KV16); 0 means never. "
            "Plain numbers mean all their pairs: 0,1 means T0KV0,T0KV1,T1KV0,T1KV1. \\[default: "
            f"{_PERIODS}]",
            rich_help_panel=_PANEL,
        ),
    ] = None
    prompts: Annotated[
        int | None,
        typer.Option(
            help=f"Number of documents of --text that are continued. \\[default: {_PROMPTS}]", rich_help_panel=_PANEL
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Maximum number of tokens of each document that are used as a prompt. \\[default: {_PROMPT_TOKENS}]",
            rich_help_panel=_PANEL,
        ),
    ] = None

    def refuse_idle(self) -> None:
        """Raise `ConfigError` for options of `--recall` if `--recall` is not given."""
        for name in ("draft", "periods", "prompts", "prompt_tokens"):
            if getattr(self, name) is not None:
                raise ConfigError.idle(name, getattr(self, name), "`recall`")

    @property
    def precisions(self) -> list[str]:
        """The precisions of the requested draft models, each once."""
        names = [name.strip() for name in (_DRAFTS if self.draft is None else self.draft).split(",")]
        for name in names:
            if name not in (*PRECISION, *DTYPES):
                raise ConfigError.no_choice("draft", name, (*PRECISION, *DTYPES[1:]))
        return list(dict.fromkeys(names))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The requested alignments of draft models, each once, as (T, KV): the periods, in tokens, in which they
        receive the token, and keys and values."""
        words = [word.strip() for word in (_PERIODS if self.periods is None else self.periods).split(",")]
        pairs = [re.fullmatch(r"[Tt](\d{1,7})[ _]?[Kk][Vv](\d{1,7})", word) for word in words]
        if all(pairs):
            found = [(int(pair[1]), int(pair[2])) for pair in pairs if pair]
        elif all(re.fullmatch(r"\d{1,7}", word) for word in words):
            found = [(token, kv) for token in map(int, words) for kv in map(int, words)]
        else:
            found = [(-1, -1)]
        if not all(0 <= period <= _MOST_PERIOD for pair in found for period in pair):
            allowed = "numbers of tokens such as 0,1,4,16 (0: never), or pairs such as T1KV16,T0KV0"
            raise ConfigError.out_of_bounds("periods", self.periods, allowed)
        return list(dict.fromkeys(found))

    @property
    def lengths(self) -> tuple[int, int]:
        """(number of prompts, tokens of each prompt)."""
        prompts = _PROMPTS if self.prompts is None else self.prompts
        length = _PROMPT_TOKENS if self.prompt_tokens is None else self.prompt_tokens
        for name, value in (("prompts", prompts), ("prompt_tokens", length)):
            if value < 1:
                raise ConfigError.out_of_bounds(name, value, "at least 1")
        return prompts, length


def compare_drafts(
    model: str,
    engine: EngineOptions,
    asked: RecallOptions,
    text: Path | None,
    tokens: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure the recall of draft models. Print and store it, and draw it if a picture is requested."""
    from smoe.cli.console import gives_json, is_quiet, note, print_json, progress
    from smoe.cli.plot_file import check_folder
    from smoe.eval.texts import read_documents

    precisions, pairs = asked.precisions, asked.pairs
    (most, length), tokens = asked.lengths, TOKENS if tokens is None else tokens
    if tokens < 1:
        raise ConfigError.out_of_bounds("tokens", tokens, "at least 1")
    if plot is not None:
        check_folder(plot, "plot")
    config = _exact(engine, length + tokens)
    documents = read_documents(text)[:most]
    import_libraries(model, None)
    from smoe.eval.draft_recall import compare
    from smoe.load.tokenizer import load_tokenizer
    from smoe.runtime.draft_model import Alignment

    alignments = [Alignment(*pair) for pair in pairs]
    with reading("tokenizer", model):
        tokenizer = load_tokenizer(model, engine.revision)
    prompts = [ids for ids in (list(tokenizer(each, verbose=False)["input_ids"][:length]) for each in documents) if ids]
    with _all_loaded(model, engine, config, precisions) as (ready, spec, drafts), progress("recall", "tokens") as bars:
        runs = len(prompts) * (1 + len(drafts) * len(alignments))
        task = bars.add_task("recall", total=runs * tokens, amount="")
        found = compare(ready, spec, drafts, prompts, tokens, alignments, lambda n: bars.update(task, advance=n))
    for name, why in found.refused.items():
        note(f"skipped: {name}: {why}")
    writes_json = gives_json(as_json)
    if not (writes_json and is_quiet()):
        _print(found)
    if writes_json:
        print_json(_circumstances(model, text, config, spec) | found.as_json())
    if plot is not None:
        _draw(found, model, alignments, plot)


def _exact(engine: EngineOptions, needed: int) -> EngineConfig:
    """Return the configuration of the exact run with which draft models are compared.

    Raises `ConfigError` for lossy settings, or if the context is too short.
    """
    config = engine.config()
    if config.lossy:
        raise ConfigError(
            "draft models are compared with a lossless run, and these settings are lossy: "
            f"{', '.join(config.lossy)}; leave these settings out, and give the draft model's precision with --draft",
            setting="recall",
            given=", ".join(config.lossy),
            allowed="exact settings with `recall`",
        )
    if config.context_tokens is None:
        return replace(config, context_tokens=needed)
    if config.context_tokens < needed:
        raise ConfigError(
            f"`context_tokens` is {config.context_tokens}, and prompts and answers need {needed} tokens: raise "
            "`context_tokens`, or lower `tokens` or `prompt_tokens`",
            setting="context_tokens",
            given=config.context_tokens,
            allowed=f"at least {needed}",
        )
    return config


@contextmanager
def _all_loaded(
    model: str, engine: EngineOptions, config: EngineConfig, precisions: list[str]
) -> Iterator[tuple[PreTrainedModel, LibrarySpec, dict[str, PreTrainedModel]]]:
    """Yield (the model, its description, {precision: draft model}). The draft models are loaded first, with all of
    their experts. The model gets the given memory budget, or the memory that remains."""
    from smoe.cli.session import loaded
    from smoe.models.read_spec import read_spec

    configs = {name: _of_draft(config, name) for name in precisions}
    with reading("headers", model):
        _check_context(model, engine, config)
    _check_room(model, engine.revision, configs)
    with ExitStack() as stack:
        drafts = {name: stack.enter_context(loaded(model, of, engine.revision)) for name, of in configs.items()}
        ready = stack.enter_context(loaded(model, config, engine.revision))
        yield ready, read_spec(model, config, engine.revision), drafts


def _check_context(model: str, engine: EngineOptions, config: EngineConfig) -> None:
    """Raise `ConfigError` if prompts and new tokens do not fit the context; the message names the options that the user
    gave."""
    from smoe.models.read_spec import read_spec

    try:
        read_spec(model, config, engine.revision)
    except ConfigError as error:
        if error.setting != "context_tokens" or engine.context is not None:
            raise
        raise ConfigError(
            f"prompts and answers need {config.context_tokens} tokens together: lower `tokens` or `prompt_tokens` "
            f"({error})",
            setting="tokens",
            given=config.context_tokens,
            allowed=error.allowed,
        ) from error


def _of_draft(config: EngineConfig, name: str) -> EngineConfig:
    """Return the configuration of a draft model: the model's configuration with another precision, and with every
    expert in memory."""
    whole = replace(config, memory_bytes=None, resident_share=1.0)
    return replace(whole, precision=name) if name in PRECISION else replace(whole, dtype=name)


def _check_room(model: str, revision: str | None, configs: dict[str, EngineConfig]) -> None:
    """Print the sizes of the draft models. Raises `ConfigError` if a pack is missing or the free memory is too
    small."""
    from smoe.cli.console import note
    from smoe.load.device import choose_device
    from smoe.machine.available_memory import free_device_bytes, less_margin
    from smoe.models.checkpoint import whole_checkpoint
    from smoe.models.read_spec import read_spec
    from smoe.policy.budget import full_bytes
    from smoe.units import format_bytes

    checkpoint, needs = whole_checkpoint(model, revision), dict[str, int]()
    for name, config in configs.items():
        spec = read_spec(model, config, revision)
        try:
            checkpoint.experts(spec)
        except ConfigError as error:
            if error.setting != "precision":
                raise
            raise ConfigError(
                f"a draft model in {name} needs its experts packed: run smoe pack --precision {name} "
                f"{shlex.quote(model)}",
                setting="draft",
                given=name,
                allowed="precisions in which the model is packed",
            ) from error
        needs[name] = full_bytes(spec.demand(config))
    free, source = free_device_bytes(choose_device(next(iter(configs.values()))))
    sizes = ", ".join(f"{name} {format_bytes(need)}" for name, need in needs.items())
    if sum(needs.values()) > less_margin(free):
        raise ConfigError(
            f"draft models are held in memory whole and need {sizes}; {format_bytes(less_margin(free))} are available "
            f"({source} less a margin): give fewer with --draft, for example one at a time",
            setting="draft",
            given=",".join(configs),
            allowed="draft models that fit in free memory",
        )
    note(
        f"all draft models are loaded completely and take at most {sizes}; the model itself gets the given memory "
        "budget, or without --memory the rest of the free memory"
    )


def _circumstances(model: str, text: Path | None, config: EngineConfig, spec: LibrarySpec) -> dict[str, Any]:
    return {
        "model": model,
        "text": str(text) if text else "stories of the demo",
        "dtype": str(spec.dtype),
        "layers": len(spec.sites),
        "experts": [site.experts for site in spec.sites],
        "top_k": [spec.anatomy.top_k[site.layer] for site in spec.sites],
        "context_tokens": config.context_tokens,
    }


def _print(found: RecallComparison) -> None:
    """Print the results of the draft models, then those of the predictors that need no draft model."""
    from rich.table import Table

    from smoe.cli.console import errors, note

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for head in _HEADS:
        table.add_column(head, justify="left" if head == _HEADS[0] else "right", no_wrap=True)
    for draft in found.drafts:
        periods = map(str, draft.alignment)
        table.add_row(draft.precision, *periods, *_shares(draft.recall), _percent(draft.own_token))
    for name, recall in found.predictors.items():
        table.add_row(name, "", "", *_shares(recall), "")
    errors().print(table)
    note(f"{sum(found.tokens)} decoded tokens were compared, after {_prompts(found)}\n{_LEGEND}")


def _shares(recall: Recall) -> list[str]:
    overall, whole = recall.overall_by_spares, recall.whole_layer_by_spares
    with_spare = [_percent(overall[1]), _percent(whole[1])] if recall.has_spares else ["-", "-"]
    return [_percent(overall[0]), _percent(whole[0]), *with_spare]


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _draw(found: RecallComparison, model: str, alignments: list[Alignment], folder: Path) -> None:
    from smoe.cli.console import note
    from smoe.eval.recall_plot import draw_by_periods, draw_by_token

    folder.mkdir(exist_ok=True)
    what = f"{Path(model).name}, {sum(found.tokens)} tokens after {_prompts(found)}"
    draw_by_token(found, f"Experts that a draft model predicts: {what}", folder / _PICTURES[0])
    note(str(folder / _PICTURES[0]))
    if len({alignment.token for alignment in alignments}) * len({alignment.kv for alignment in alignments}) > 1:
        draw_by_periods(found, f"Recall by periods of alignment: {what}", folder / _PICTURES[1])
        note(str(folder / _PICTURES[1]))


def _prompts(found: RecallComparison) -> str:
    return f"{len(found.tokens)} prompt{'s' if len(found.tokens) != 1 else ''}"
