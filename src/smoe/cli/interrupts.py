"""SIGTERM means what Ctrl-C means: the work at hand ends in order and what it has brought so far is kept.

Ctrl-C leaves with exit code 130, SIGTERM with 143, as shells have it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

INTERRUPTED, TERMINATED = 130, 143
REFUSED = 3
"""The exit code of a worker that its main refuses: whoever keeps it running need not start it again."""

_was_terminated = False


class Terminated(KeyboardInterrupt):
    """SIGTERM, wherever the program was."""


def was_terminated() -> bool:
    """Whether the process was asked to end, and not only what it is doing."""
    return _was_terminated


def exit_code() -> int:
    """The exit code of a command that was interrupted."""
    return TERMINATED if _was_terminated else INTERRUPTED


@contextmanager
def ending_in_order(*, as_json: bool) -> Iterator[None]:
    """Inside, an interrupt that nobody has answered ends the command: a word, and its exit code."""
    from smoe.cli.console import print_json, warn

    try:
        yield
    except KeyboardInterrupt as interrupt:
        words = str(interrupt) or "interrupted"
        warn(words)
        if as_json:
            print_json({"error": {"type": "Interrupted", "message": words}})
        raise typer.Exit(exit_code()) from None


@contextmanager
def listening() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated`, a `KeyboardInterrupt`, in the main thread."""
    global _was_terminated
    _was_terminated = False
    if threading.current_thread() is not threading.main_thread():  # nobody else may ask for signals
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(*_: Any) -> None:
    global _was_terminated
    _was_terminated = True
    raise Terminated
