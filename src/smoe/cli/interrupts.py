"""SIGTERM and SIGHUP mean what Ctrl-C means: the work ends in order and its output so far remains.

a signal           a `KeyboardInterrupt` wherever the program is, or a call of the handler (`answered_by`)
in an import       leaves at once: there is nothing to keep, and a library that is cut in two says strange things
while it ends      leaves at once, after a word

Ctrl-C leaves with exit code 130, SIGTERM with 143, SIGHUP (the terminal has gone) with 129, as shells have it. A signal
that the parent process has it ignore (`nohup`, `&` in a script) stays ignored.

Windows has Ctrl-C, and what ends a program in order is Ctrl-Break (SIGBREAK, 149), which the closing of its window is,
too; other ways to end a program there end it at once. A lock that is waited for is not interrupted there.
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
"""The exit code of a worker that its coordinator refuses: its supervisor need not restart it."""

_HANGUP = getattr(signal, "SIGHUP", None)
_BREAK = getattr(signal, "SIGBREAK", None)
_NUMBERS = [number for number in (signal.SIGINT, signal.SIGTERM, _HANGUP, _BREAK) if number is not None]
_SHOW_CURSOR = "\x1b[?25h"
_PATIENCE = 2
"""Signals that a program which ends at the first one takes before it leaves at once: a key may be pressed twice."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, SIGHUP or SIGBREAK, wherever the program was."""


class _State:
    """The process's state since `listening` began."""

    def __init__(self) -> None:
        self.first: int | None = None
        """What the process ends by: of several signals the first that is no Ctrl-C, as that may mean less."""
        self.received = 0
        self.answer: Callable[[int], None] | None = None
        self.ends_at_the_first = self.is_ending = self.is_leaving = self.as_json = False


_state = _State()


def was_terminated() -> bool:
    """Whether the process was asked to end, and not only what it is doing."""
    return _state.first not in (None, signal.SIGINT)


def exit_code() -> int:
    """The exit code of a command that was interrupted."""
    return 128 + (_state.first or signal.SIGINT)


@contextmanager
def ending_in_order(*, as_json: bool) -> Iterator[None]:
    """Inside, an unhandled interrupt ends the command with a line and its exit code."""
    from smoe.cli.console import print_json, warn

    _state.as_json = as_json
    try:
        yield
    except KeyboardInterrupt as interrupt:
        _state.is_ending = True
        words = str(interrupt) or "interrupted"
        warn(words)
        if as_json:
            print_json(_as_json(words))
        raise typer.Exit(exit_code()) from None


@contextmanager
def at_the_first() -> Iterator[None]:
    """Inside, one signal ends the command, even if the `KeyboardInterrupt` is swallowed or becomes another error; one
    more changes nothing, as it is ending; with a third it leaves at once."""
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
    """Inside, signals call `answer` (in the main thread, between any two steps of it) and raise nothing."""
    check()
    _state.answer = answer
    try:
        yield
    finally:
        _state.answer = None


def check() -> None:
    """Raise the `KeyboardInterrupt` of a signal that was received, where a destructor or a library has swallowed it."""
    if _state.received:
        raise Terminated if was_terminated() else KeyboardInterrupt


@contextmanager
def listening() -> Iterator[None]:
    """Inside, signals mean what this module says. In the main thread only: Python allows no other."""
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
        if _state.first == _HANGUP:  # from the shell and from the terminal: they mean one thing
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
    """End at once. No library is asked to write: it may be what was cut."""
    if _state.is_leaving:  # one more, in the middle of the word
        os._exit(128 + number)
    _state.is_leaving, words = True, "interrupted"
    with suppress(OSError):
        if _state.as_json and not _state.is_ending:
            os.write(1, f"{json.dumps(_as_json(words))}\n".encode())
    with suppress(OSError):
        os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}{words}\n".encode())
    os._exit(128 + number)


def _as_json(words: str) -> dict[str, Any]:
    return {"error": {"type": "Interrupted", "message": words}}


def _forget_the_terminal() -> None:
    """Output to a terminal that has gone is dropped, without an error."""
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
