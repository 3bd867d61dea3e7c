"""Handles SIGTERM and SIGHUP as Ctrl-C: the work ends in order, and its output so far remains.

a signal           a `KeyboardInterrupt` at any point of the program, or a call of the handler (`answered_by`)
in an import       ends at once: there is nothing to save, and an interrupted import causes strange errors
while it ends      ends at once, after a message

The exit code is 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP (the terminal was closed), as in shells. A signal that
the parent process has set to ignored (`nohup`, `&` in a script) stays ignored.

On Windows, Ctrl-C and Ctrl-Break (SIGBREAK, 149) end a program in order, and so does closing its window; other ways end
it at once. Waiting for a lock is not interrupted there.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import typer

if sys.platform != "win32":
    import termios

REFUSED = 3
"""The exit code of a worker that its coordinator refuses: its supervisor must not restart it."""

_HANGUP = getattr(signal, "SIGHUP", None)
_BREAK = getattr(signal, "SIGBREAK", None)
_NUMBERS = [number for number in (signal.SIGINT, signal.SIGTERM, _HANGUP, _BREAK) if number is not None]
_END_OF_BAR = "\r\x1b[K\x1b[?25h"
"""Erases the line of a progress bar, and shows the cursor."""
_INTERRUPTED = "interrupted"
_PATIENCE = 2
"""The number of signals after which one more makes the program exit at once. It is two, because a key may be pressed
twice."""


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM, SIGHUP or SIGBREAK."""


class _State:
    """The signals that the process has received since `listening` began."""

    def __init__(self) -> None:
        self.first: int | None = None
        """The signal that determines the exit code: the first one that is not Ctrl-C, if there is one."""
        self.received = 0
        self.answer: Callable[[int], None] | None = None
        self.ends_at_the_first = self.is_ending = self.is_leaving = self.as_json = False


_state = _State()


def was_terminated() -> bool:
    """Return whether a signal asks the whole process to end, and not only its current work (as Ctrl-C does)."""
    return _state.first not in (None, signal.SIGINT)


def was_interrupted() -> bool:
    """Return whether a signal has arrived."""
    return _state.received > 0


def exit_code() -> int:
    """Return the exit code of an interrupted command."""
    return 128 + (_state.first or signal.SIGINT)


@contextmanager
def ending_in_order(*, as_json: bool) -> Iterator[None]:
    """If a signal interrupts the `with` block, print a message and end the command with the signal's exit code."""
    from smoe.cli.console import print_json

    _state.as_json = as_json
    try:
        yield
    except KeyboardInterrupt as interrupt:
        _state.is_ending = True
        words = interrupted(str(interrupt))
        print_interrupted(str(interrupt))
        if as_json:
            print_json(_as_json(words))
        raise typer.Exit(exit_code()) from None


def interrupted(consequence: str = "") -> str:
    """Return the text that every interrupted command prints. `consequence`: what was stored, or what has ended."""
    return f"{_INTERRUPTED}; {consequence}" if consequence else _INTERRUPTED


def print_interrupted(consequence: str = "") -> None:
    """Print that a signal has interrupted the command, also with --quiet."""
    from smoe.cli.console import note

    note(interrupted(consequence), is_asked=True)


@contextmanager
def at_the_first() -> Iterator[None]:
    """During the `with` block, let the first signal end the command, even if its `KeyboardInterrupt` is swallowed or
    becomes another error. A second signal has no effect, because the command is already ending. A third signal ends it
    at once."""
    _state.ends_at_the_first = True
    try:
        yield
    except typer.Exit:
        raise
    except Exception:
        check()
        raise
    check()


@contextmanager
def answered_by(answer: Callable[[int], None]) -> Iterator[None]:
    """During the `with` block, a signal calls `answer` and raises no exception. The call comes in the main thread,
    between any two instructions."""
    check()
    _state.answer = answer
    try:
        yield
    finally:
        _state.answer = None


def check() -> None:
    """Raise `KeyboardInterrupt` if a signal has arrived whose exception a destructor or a library has swallowed."""
    if _state.received:
        raise Terminated if was_terminated() else KeyboardInterrupt


@contextmanager
def listening() -> Iterator[None]:
    """Handle signals as this module describes, for the duration of the `with` block. Only in the main thread, where
    Python allows it."""
    global _state
    _state = _State()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    unraisable = sys.unraisablehook
    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, _hear)
    sys.unraisablehook = lambda what: None if what.exc_type in (KeyboardInterrupt, Terminated) else unraisable(what)
    try:
        yield
    finally:
        sys.unraisablehook = unraisable
        for number, handler in before.items():
            if signal.getsignal(number) is _hear:
                signal.signal(number, handler)


def _hear(number: int, frame: FrameType | None) -> None:
    if number == _HANGUP:
        _forget_the_terminal()
        if _state.first == _HANGUP:  # the shell and the terminal both send it
            return
    _state.received += 1
    if _state.first in (None, signal.SIGINT):
        _state.first = number
    if _state.is_ending or _is_importing(frame) or (_state.ends_at_the_first and _state.received > _PATIENCE):
        _leave(number)
    if _state.answer is not None:
        _state.answer(number)
    elif not _state.ends_at_the_first or _state.received == 1:
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _leave(number: int) -> NoReturn:
    """End the process at once, after a message that is written without any library, because the signal may have
    interrupted one."""
    if _state.is_leaving:  # another signal within this function
        os._exit(128 + number)
    _state.is_leaving, words = True, interrupted()
    with suppress(OSError):
        if _state.as_json and not _state.is_ending:
            os.write(1, f"{json.dumps(_as_json(words))}\n".encode())
    with suppress(OSError):
        os.write(2, f"{_END_OF_BAR if os.isatty(2) else ''}{words}\n".encode())
    os._exit(128 + number)


def _as_json(words: str) -> dict[str, Any]:
    return {"error": {"type": "Interrupted", "message": words}}


def _forget_the_terminal() -> None:
    """Discard the output to a terminal that was closed, so that writing raises no error."""
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
