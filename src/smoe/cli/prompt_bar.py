"""A line on the terminal for prompts whose prefill takes seconds, while `smoe serve` runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from smoe.cli.console import errors, is_quiet, progress
from smoe.generation.loop import Prefill

_PATIENCE_SECONDS = 2.0
_LOOK_SECONDS = 0.5


class PromptBar:
    """Shows, during the `with` block, a progress bar on stderr for each prompt whose prefill takes longer than two
    seconds. The bar disappears with the first token. Without a terminal, and with --quiet, nothing is shown."""

    def __init__(self, prefill: Callable[[], Prefill | None], look_seconds: float = _LOOK_SECONDS) -> None:
        """`prefill` returns the state of the prefill in progress, or None."""
        self._prefill, self._look_seconds = prefill, look_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="smoe-prompts-read", daemon=True)

    def __enter__(self) -> PromptBar:
        if errors().is_terminal and not is_quiet():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self._look_seconds):
            found = self._prefill()
            if found is not None and found.seconds >= _PATIENCE_SECONDS:
                self._show(found)

    def _show(self, found: Prefill) -> None:
        begun, now = found.begun, found
        with progress() as bars:
            task = bars.add_task("reading a prompt", total=found.tokens, amount="")
            while now.begun == begun:
                amount = f"{now.tokens_read:,} of {now.tokens:,} tokens"
                bars.update(task, completed=now.tokens_read, total=now.tokens, amount=amount)
                later = None if self._done.wait(self._look_seconds) else self._prefill()
                if later is None:
                    return
                now = later
