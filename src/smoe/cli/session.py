"""Loads a model for a command, shows the progress of loading, and prints how the budget is divided."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import PreTrainedModel

from smoe.cli.console import Patience, as_options, note, warn
from smoe.cli.keeping import warn_if_unwritable
from smoe.cli.settings import in_words
from smoe.config import EngineConfig
from smoe.errors import ContextError
from smoe.garbage import present_objects_excluded
from smoe.generation.generate import encode
from smoe.load.draft_model import is_apart, placed_draft
from smoe.load.ledger import WHOLE_FITS
from smoe.load.pretrained import load
from smoe.load.tokenizer import load_tokenizer
from smoe.models.checkpoint import Checkpoint, whole_checkpoint
from smoe.models.files import local_place
from smoe.models.finish_spec import position_limit
from smoe.models.load_observer import LoadObserver
from smoe.policy.budget import Ledger
from smoe.runtime.engine import Engine
from smoe.units import format_bytes, format_count

_log = logging.getLogger(__name__)


@contextmanager
def loaded_with_tokenizer(
    model: str,
    config: EngineConfig,
    revision: str | None,
    template: str | None = None,
    prompts: Sequence[str] = (),
    new_tokens: int = 1,
    *,
    describes: bool = True,
) -> Iterator[tuple[PreTrainedModel, Any]]:
    """Yield the model as `loaded` does, and its tokenizer, with `template` in place of its own chat template.

    The tokenizer is built before the budget is divided: 150,000 tokens take 230 MiB for a moment. `prompts` that are
    empty, or too long for `new_tokens` more tokens, are refused before the weights are read. `describes` is as for
    `loaded`.
    """
    built = list[Any]()

    def build() -> None:
        built.append(load_tokenizer(model, revision, template))

    def check(ledger: Ledger) -> None:
        context = ledger.demand.context_tokens
        if any(not each.strip() or len(each.encode()) >= context for each in prompts):  # a token is seldom shorter
            checkpoint = whole_checkpoint(model, revision)
            _check_prompts(built[0], prompts, context, new_tokens, checkpoint)

    with loaded(model, config, revision, build, check, describes=describes) as ready:
        yield ready, built[0]


@contextmanager
def loaded(
    model: str,
    config: EngineConfig,
    revision: str | None,
    on_examined: Callable[[], None] = lambda: None,
    on_divided: Callable[[Ledger], None] = lambda ledger: None,
    *,
    describes: bool = True,
) -> Iterator[PreTrainedModel]:
    """Yield the loaded model with its engine, which is closed after the `with` block. With `describes`, print how the
    memory budget is divided and which settings were chosen; else only log it, because the command prints it later.

    `on_examined` and `on_divided` are called before the weights are read, as the methods of a `LoadObserver` are.
    """
    transformers.logging.set_verbosity_error()
    warn_if_unwritable()
    watch = _Watch(model, config, on_examined, on_divided)
    try:
        ready = load(model, config, revision, watch)
    finally:
        watch.stop()
    engine: Any = ready.offload
    try:
        _note_engine(model, engine, note if describes else _log.info)
        with present_objects_excluded():
            yield ready
    finally:
        engine.close()
        for doubt in engine.executor.compute.others.doubts if engine.executor.compute.others is not None else ():
            warn(doubt)


def _note_engine(model: str, engine: Engine, say: Callable[[str], None]) -> None:
    """Pass on to `say` how an engine uses its memory, and why some of its settings have their values. Print which
    workers are connected."""
    _log.info("%s is loaded", model)
    _log.debug("%s", engine.config)
    for line in described(engine):
        say(line)
    if engine.executor.compute.others is not None:
        came = [each["name"] for each in engine.executor.compute.others.described() if each["state"] == "ready"]
        note(f"connected workers: {', '.join(came) or 'none yet'}")
        if is_apart(engine.config):
            _note_draft(engine.executor.compute.others.draft)


def described(engine: Engine) -> list[str]:
    """Return lines that say how an engine divides its memory budget, and why some of its settings have their values."""
    ledger = engine.ledger
    lines = [describe(ledger, engine.budget_reason, engine.config.keeps_experts)]
    if not ledger.holds_all:
        lines.append(division(ledger, engine.context_tokens, engine.config))
    if engine.config.images:
        encoder = format_bytes(ledger.demand.image_encoder_bytes)
        lines.append(f"prompts can contain images: the image encoder takes {encoder} of the memory budget")
    return lines + settings_chosen(engine)


def settings_chosen(engine: Engine) -> list[str]:
    """Return a line for each setting that the user left out and that was chosen for the model, with the reason."""
    reasons = engine.reasons.items()
    return [as_options(f"`{name}={in_words(getattr(engine.config, name))}` is used: {why}") for name, why in reasons]


def _check_prompts(
    tokenizer: Any, prompts: Sequence[str], context_tokens: int, new_tokens: int, checkpoint: Checkpoint
) -> None:
    """Raise `ConfigError` for an empty prompt, and `ContextError` for one that is too long."""
    longest = max(map(len, encode(tokenizer, prompts)))
    if longest >= context_tokens:
        raise ContextError.of_prompt(longest, context_tokens, position_limit(checkpoint.config()), new_tokens)


def _note_draft(report: dict[str, Any] | None) -> None:
    """Print whether a cluster's draft model is connected."""
    if report is None:
        warn(
            "no draft model has connected, so workers do not prefetch yet; start a draft model (smoe cluster join "
            "--draft), or run it on this machine (--set draft_on=coordinator)"
        )
    elif report["state"] == "ready":
        note(f"draft model: {report['name']}, in {report['precision']}")
    else:
        warn(
            f"the draft model {report['name']} is not ready: {report['state']}"
            f"{f', {reason}' if (reason := report['why']) else ''}"
        )


def _open_to(cluster: str) -> str:
    """Return in words on which address the coordinator will listen, and which machines it will admit."""
    from smoe.cluster.address import reach_of
    from smoe.cluster.stored_identity import read_coordinator

    coordinator = read_coordinator(cluster)
    reach = reach_of(coordinator.address, coordinator.everywhere)
    return f"listening for workers at {reach}; admitted: {coordinator.who_may_come()}"


def describe(ledger: Ledger, reason: str, keeps_experts: bool = True) -> str:
    """Return the division of the memory budget in one line. `keeps_experts`: whether this machine holds experts while
    workers are connected."""
    experts = ledger.demand.total_experts
    if keeps_experts and ledger.holds_all:
        origin = "" if reason == WHOLE_FITS else f" (budget {format_bytes(ledger.budget_bytes)}, {reason})"
        return f"the whole model fits in {format_bytes(ledger.total_bytes)}{origin}, all {experts} experts resident"
    experts_text = ledger.residents if keeps_experts else ledger.spare
    return f"budget {format_bytes(ledger.budget_bytes)} ({reason}), {experts_text}"


def division(ledger: Ledger, context_tokens: int, config: EngineConfig) -> str:
    """Return a phrase with the parts of the memory budget, and with options that would leave more memory for
    experts."""
    entries = {name: format_bytes(nbytes) for name, nbytes in ledger.entries().items() if nbytes}
    cache, texts = format_bytes(ledger.demand.kv_cache_bytes), format_count(config.max_sequences, "sequence")
    entries["KV cache"] = f"{cache} for {texts} of {context_tokens} tokens"
    parts = f"it holds: {', '.join(f'{name} {size}' for name, size in entries.items())}"
    if config.expert_cache != "budget" or config.resident_share is not None:
        return parts
    smaller = "--context or --max-sequences leaves" if config.max_sequences > 1 else "--context leaves"
    return f"{parts}; a smaller {smaller} more for experts"


class _Watch(LoadObserver):
    """Shows the progress of loading: reading headers, verifying packs, reading weights, and what follows."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        on_examined: Callable[[], None],
        on_divided: Callable[[Ledger], None],
    ) -> None:
        self._model, self._config = model, config
        self._on_examined, self._on_divided = on_examined, on_divided
        self._bytes: tuple[int, int] | None = None
        self._bar: Patience | None = None
        if local_place(model) is not None:  # a download has bars of its own
            self._show(f"reading the headers of {model}")

    def examined(self) -> None:
        self._on_examined()

    def short_of_memory(self, message: str) -> None:
        warn(message)

    def pack_bytes(self, done: int, total: int) -> None:
        self._show_bytes("checking the packed file, once on this machine", done, total)
        if done == total:
            self.stop()

    def divided(self, ledger: Ledger) -> None:
        self.stop()
        self._on_divided(ledger)
        if self._config.cluster is not None:
            _note_cluster(self._config, self._config.cluster)
        self._show(f"loading {self._model}")

    def weight_bytes(self, done: int, total: int) -> None:
        self._show_bytes(f"loading {self._model}", done, total)
        if done == total:
            self._show(f"preparing {self._model}")

    def host_tier(self, nbytes: int) -> None:
        self._show(f"allocating {format_bytes(nbytes)} of host memory")

    def stop(self) -> None:
        """Remove the line that shows the progress."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, title: str) -> None:
        """Show a phase whose amount is unknown."""
        self.stop()
        self._bytes = None
        self._bar = Patience(title, lambda: self._bytes)
        self._bar.start()

    def _show_bytes(self, title: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of a phase have been read."""
        if self._bar is None or self._bar.title != title:
            self._show(title)
        self._bytes = done, total


def _note_cluster(config: EngineConfig, cluster: str) -> None:
    """Print on which address the coordinator listens, and for which workers this command will wait."""
    note(_open_to(cluster))
    awaited = format_count(config.cluster_workers, "worker")
    awaited += " and a draft model" if is_apart(placed_draft(config)) else ""
    seconds = f"{config.cluster_timeout_seconds:g} s"
    note(f"after loading, this command waits up to {seconds} for {awaited} of the cluster {cluster}")
