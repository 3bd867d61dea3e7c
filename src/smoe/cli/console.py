"""What people see: everything but a command's own output goes to stderr; colours only where a terminal shows them."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn

from smoe.errors import BudgetError, ContextError, NotMoEError, SmoeError
from smoe.units import format_bytes, format_remaining

_PATIENCE_SECONDS = 1.0
_LINE_SECONDS = 10.0
_HINTS = {
    BudgetError: "smoe plan MODEL, without --memory, shows what each budget buys.",
    ContextError: "the context is part of the budget: see smoe plan MODEL --context N.",
    NotMoEError: "models with experts are, for example, Qwen/Qwen3-30B-A3B and mistralai/Mixtral-8x7B-v0.1.",
}


def errors() -> Console:
    """A console on stderr (as it is now: tests and redirections replace it)."""
    return Console(stderr=True, highlight=False)


def output() -> Console:
    """A console on stdout, for tables that are a command's result."""
    return Console(highlight=False)


def print_json(value: Any) -> None:
    """One JSON object, one line, on stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A quiet word to the user."""
    errors().print(f"[dim]{escape(text)}[/dim]", soft_wrap=True)


def complain(error: SmoeError) -> None:
    """One message, and a hint where there is one."""
    console = errors()
    console.print(f"[bold red]error:[/bold red] {escape(_message(error))}", soft_wrap=True)
    for kind, hint in _HINTS.items():
        if isinstance(error, kind):
            console.print(f"[bold]hint:[/bold] {escape(hint)}", soft_wrap=True)


@contextmanager
def progress(command: str = "", unit: str = "", clock: Callable[[], float] = monotonic) -> Iterator[Progress]:
    """Bars on stderr that disappear when done; where stderr is not a terminal, a plain line now and then instead.

    Lines begin with the command and count in `unit`, unless the task has an `amount` of its own.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    console = errors()
    with (
        Progress(*columns, console=console, transient=True, get_time=clock)
        if console.is_terminal
        else _Lines(command, unit, console, clock)
    ) as bars:
        yield bars


class _Lines(Progress):
    """Progress for a log: `eval: alpha 0.3, 412 of 1,200 tokens, 3 min left`, at most every ten seconds."""

    def __init__(self, command: str, unit: str, console: Console, clock: Callable[[], float]) -> None:
        super().__init__(console=console, disable=True, get_time=clock)
        self._start = f"{command}: " if command else ""
        self._unit = unit
        self._said = clock()

    def update(self, task_id: TaskID, *args: Any, **changes: Any) -> None:
        super().update(task_id, *args, **changes)
        if self.get_time() - self._said >= _LINE_SECONDS:
            self._said = self.get_time()
            note(self._start + ", ".join(self._parts(self._tasks[task_id])))

    def _parts(self, task: Task) -> Iterator[str]:
        yield task.description
        if task.fields["amount"]:
            yield task.fields["amount"]
        elif task.total is not None:
            yield f"{max(0, task.completed):,.0f} of {task.total:,.0f} {self._unit}".rstrip()
        if task.total is not None and 0 < task.completed < task.total:
            yield f"{format_remaining((task.elapsed or 0.0) * (task.total / task.completed - 1))} left"


class Patience:
    """A bar on stderr that appears when something takes longer than a second, and goes when it ends.

    `amount()` gives (done, all) in bytes; without it the bar only says that something is going on.
    """

    def __init__(self, title: str, amount: Callable[[], tuple[int, int]] | None = None) -> None:
        self._title = title
        self._amount = amount
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, name="smoe-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take the bar away; from then on the terminal is the caller's. Any number of times."""
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _show(self) -> None:
        if self._done.wait(_PATIENCE_SECONDS):
            return
        with progress() as bars:
            task = bars.add_task(self._title, total=None, amount="")
            while not self._done.wait(0.2):
                if self._amount is not None:
                    done, total = self._amount()
                    shown = f"{format_bytes(done)} of {format_bytes(total)}"
                    bars.update(task, completed=done, total=total, amount=shown)


def _message(error: SmoeError) -> str:
    """The error's own words, without the error number that an OSError puts first."""
    if isinstance(error, OSError) and len(error.args) == 2:
        return str(error.args[1])
    return str(error)
