"""The line for a long prompt of a served model. Would catch a server that is silent for a minute, one that writes into
a log, and a bar that stays."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from smoe.cli import console, prompt_bar
from smoe.cli.prompt_bar import PromptBar
from smoe.generation.loop import Prefill

LONG = [Prefill(5.0, 3.0, 2048, 7900), Prefill(5.0, 3.5, 4096, 7900)]


def shown(monkeypatch: pytest.MonkeyPatch, states: list[Prefill | None], *, terminal: bool = True) -> str:
    """What is written while the prefill has these states, one after the other."""
    screen, over = Console(file=io.StringIO(), force_terminal=terminal, width=100), threading.Event()
    left: Iterator[Prefill | None] = iter(states)

    def prefill() -> Prefill | None:
        try:
            return next(left)
        except StopIteration:
            over.set()
            return None

    for module in (console, prompt_bar):
        monkeypatch.setattr(module, "errors", lambda: screen)
    with PromptBar(prefill, 0.001):
        assert over.wait(30 if terminal else 0) or not terminal
    return screen.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_long_prompt_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, [None, *LONG, Prefill(9.0, 0.0, 0, 10)])
    assert "reading a prompt" in text and "of 7,900 tokens" in text and "of 10 tokens" not in text


def test_a_short_one_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, [Prefill(5.0, 1.0, 0, 7900), None]) == ""


def test_neither_a_log_nor_a_quiet_terminal_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, [*LONG], terminal=False) == ""
    with console.speaking(quietly=True):
        screen = Console(stderr=True, force_terminal=True)
        monkeypatch.setattr(prompt_bar, "errors", lambda: screen)
        with PromptBar(lambda: LONG[0], 0.001) as bar:
            assert bar._thread.ident is None
