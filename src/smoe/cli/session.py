"""Loads a model for a command, shows the progress of loading, and prints how the budget is divided."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import transformers
from transformers import PreTrainedModel

from smoe.cli.console import Patience, note, warn
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
from smoe.policy.budget import Ledger
from smoe.runtime.engine import Engine
from smoe.runtime.offloaded_model import OffloadedModel
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
) -> Iterator[tuple[PreTrainedModel, Any]]:
    """Yield the model as `loaded` does, and its tokenizer, with `template` in place of its own chat template.

    The tokenizer is built before the budget is divided: 150,000 tokens take 230 MiB for a moment. `prompts` that are
    empty, or too long for `new_tokens` more tokens, are refused before the weights are read.
    """
    built = list[Any]()

    def build() -> None:
        built.append(load_tokenizer(model, revision, template))

    def check(ledger: Ledger) -> None:
        context = ledger.demand.context_tokens
        if any(not each.strip() or len(each.encode()) >= context for each in prompts):  # a token is seldom shorter
            checkpoint = whole_checkpoint(model, revision)
            _check_prompts(built[0], prompts, context, new_tokens, checkpoint)

    with loaded(model, config, revision, build, check) as ready:
        yield ready, built[0]


@contextmanager
def loaded(
    model: str,
    config: EngineConfig,
    revision: str | None,
    on_examined: Callable[[], None] = lambda: None,
    on_ledger: Callable[[Ledger], None] = lambda ledger: None,
) -> Iterator[PreTrainedModel]:
    """Yield the loaded model with its engine, which is closed after the `with` block. Print the memory budget, the
    reason for its size, and its parts.

    `on_examined` and `on_ledger` are called as by `load`, before the weights are read.
    """
    ready = _load(model, config, revision, on_examined, on_ledger)
    engine: Any = ready.offload
    try:
        _note_engine(model, engine)
        with present_objects_excluded():
            yield ready
    finally:
        engine.close()
        for doubt in engine.executor.compute.others.doubts if engine.executor.compute.others is not None else ():
            warn(doubt)


def _load(
    model: str,
    config: EngineConfig,
    revision: str | None,
    on_examined: Callable[[], None],
    on_ledger: Callable[[Ledger], None],
) -> OffloadedModel:
    """Load a model, and show the progress of reading headers, checking packs and loading."""
    transformers.logging.set_verbosity_error()
    warn_if_unwritable()
    opening, watch, checking = Patience(f"reading the headers of {model}"), _Watch(model), _Checking()

    def start(ledger: Ledger) -> None:
        opening.stop()
        on_ledger(ledger)
        if config.cluster is not None:
            note(_open_to(config.cluster))
            awaited = format_count(config.cluster_workers, "worker")
            awaited += " and a draft model" if is_apart(placed_draft(config)) else ""
            seconds = f"{config.cluster_timeout_seconds:g} s"
            note(f"after loading, this command waits up to {seconds} for {awaited} of the cluster {config.cluster}")
        watch.start()

    def check(done: int, total: int) -> None:
        opening.stop()
        checking.show(done, total)

    if local_place(model) is not None:  # a download has bars of its own
        opening.start()
    try:
        return load(model, config, revision, start, watch.lock, warn, check, on_examined)
    finally:
        opening.stop()
        checking.stop()
        watch.stop()


def _note_engine(model: str, engine: Engine) -> None:
    """Print and log how an engine uses its memory, why some of its settings have their values, and which workers are
    connected."""
    described = describe(engine.ledger, engine.budget_reason, engine.config.keeps_experts)
    _log.info("%s is loaded: %s", model, described)
    _log.debug("%s", engine.config)
    note(described)
    if engine.ledger.cache_slots < engine.ledger.demand.total_experts:
        note(division(engine.ledger, engine.context_tokens, engine.config))
    for name, why in engine.reasons.items():
        value = in_words(getattr(engine.config, name))
        _log.info("%s %s, %s", name, value, why)
        note(f"{name}={value} is used: {why}")
    if engine.executor.compute.others is not None:
        came = [each["name"] for each in engine.executor.compute.others.described() if each["state"] == "ready"]
        note(f"connected workers: {', '.join(came) or 'none yet'}")
        if is_apart(engine.config):
            _note_draft(engine.executor.compute.others.draft)


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
    from smoe.cluster.identity import read_coordinator

    coordinator = read_coordinator(cluster)
    reach = reach_of(coordinator.address, coordinator.everywhere)
    return f"listening for workers at {reach}; admitted: {coordinator.who_may_come()}"


def describe(ledger: Ledger, reason: str, keeps_experts: bool = True) -> str:
    """Return the division of the memory budget in one line. `keeps_experts`: whether this machine holds experts while
    workers are connected."""
    experts = ledger.demand.total_experts
    if keeps_experts and ledger.cache_slots >= experts:
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


class _Checking:
    """A progress bar for each pack that is verified, if that takes longer than a second."""

    def __init__(self) -> None:
        self._bar: Patience | None = None
        self._amount = (0, 0)

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes have been read."""
        self._amount = done, total
        if self._bar is None:
            self._bar = Patience("checking the packed file, once on this machine", lambda: self._amount)
            self._bar.start()
        if done == total:
            self.stop()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _Watch:
    """A line that shows how much memory the loaded part of a model takes, measured by the growth of the process's
    resident memory. The total is unknown, because slots for experts get their memory while other weights are read.

    It starts when the memory budget is known, which is after any download.
    """

    def __init__(self, model: str) -> None:
        self._bar = Patience(f"loading {model} into memory", self._amount)
        self._process = psutil.Process()
        self._before = self._most = 0

    def start(self) -> None:
        self._before = self._process.memory_info().rss
        self._bar.start()

    def lock(self, nbytes: int) -> None:
        """Show that host memory for experts is allocated and locked, which is done with a GPU."""
        self._bar.rename(f"allocating {format_bytes(nbytes)} of host memory")

    def stop(self) -> None:
        self._bar.stop()

    def _amount(self) -> tuple[int, None]:
        """Return the most bytes so far; loading also frees memory."""
        self._most = max(self._most, self._process.memory_info().rss - self._before)
        return self._most, None
