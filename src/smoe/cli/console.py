"""Output for the user. The result of a command goes to stdout, all other output to stderr, with colours only on a
terminal. A quiet command (--quiet) prints its result, warnings and errors only."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from smoe.cli.mistyped import allowed_value, explain_mistyped, is_mistyped
from smoe.cli.settings import OPTION_OF, SERVED_SEQUENCES, in_words, option_of
from smoe.cli.typed_value import typed_value
from smoe.errors import BudgetError, ContextError, NotMoEError, SmoeError
from smoe.policy.registry import DRAFT
from smoe.presets import PRESETS
from smoe.units import format_bytes, format_remaining

_PATIENCE_SECONDS = 0.5
"""Seconds after which a terminal shows what is being done."""
_SILENT_SECONDS = 4.0
"""Seconds without output after which a line says what is being done, if stderr is no terminal."""
_LINE_SECONDS = 10.0
_HINTS = {
    ContextError: "the context is part of the budget: see smoe plan {model} --context N.",
    NotMoEError: "models with experts are, for example, Qwen/Qwen3-30B-A3B and mistralai/Mixtral-8x7B-v0.1.",
}

_is_quiet = False
_silent_since = monotonic()
"""When this command began, or when it last printed a note or warning."""
_warned: set[str] = set()
"""The subjects about which this command has warned (`warn_once`)."""


@contextmanager
def speaking(*, quietly: bool) -> Iterator[None]:
    """Show notes, bars and summaries (or not, if `quietly`) for the duration of the `with` block."""
    global _is_quiet
    before, _is_quiet = _is_quiet, quietly
    _warned.clear()
    _end_silence()
    try:
        yield
    finally:
        _is_quiet = before


def is_quiet() -> bool:
    """Return whether only results, warnings and errors are printed."""
    return _is_quiet


def errors() -> Console:
    """Return a console on the current stderr, which tests and redirections replace."""
    return Console(stderr=True, highlight=False)


def output() -> Console:
    """Return a console on stdout, for tables that are a command's result."""
    return Console(highlight=False)


def print_rows(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 0) -> None:
    """Print a table on stdout. The first `left` columns are aligned to the left, the others to the right."""
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < left else "right")
    for row in rows:
        table.add_row(*row)
    output().print(table)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON on stdout."""
    is_plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    sys.stdout.write(json.dumps(value, ensure_ascii=is_plain, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_json_error(error: BaseException) -> None:
    """Print an error as a JSON object; an error about a setting has the setting, its value and the allowed values."""
    facts = error.facts if isinstance(error, SmoeError) else _facts_of_a_mistyped_line(error)
    in_words = {name: as_options(fact) for name, fact in facts.items() if name == "allowed" and isinstance(fact, str)}
    print_json({"error": {"type": type(error).__name__, "message": words_of(error)} | facts | in_words})


def _facts_of_a_mistyped_line(error: BaseException) -> dict[str, object]:
    """Return the details, ready for JSON, of an option or argument that the parser of the command line has refused."""
    parameter = getattr(error, "param", None)
    if parameter is None:
        return {}
    given = typed_value(parameter.opts)
    setting = next((name for name, option in OPTION_OF.items() if option in parameter.opts), parameter.name)
    return {"setting": setting, "given": given, "allowed": allowed_value(error)}


def stdin() -> TextIO | None:
    """Return stdin, or None if it is closed. Bytes that are not UTF-8 become surrogates, which `check_text` refuses. On
    Windows, files and pipes are read as UTF-8, unless PYTHONIOENCODING is set."""
    if sys.stdin is None or sys.stdin.closed:
        return None
    if hasattr(sys.stdin, "reconfigure"):
        is_file = sys.platform == "win32" and not sys.stdin.isatty() and "PYTHONIOENCODING" not in os.environ
        sys.stdin.reconfigure(encoding="utf8" if is_file else None, errors="surrogateescape")
    return sys.stdin


def gives_json(is_asked: bool) -> bool:
    """Return whether a command, whose tables go to stderr, prints JSON on stdout. It does so if stdout is no terminal,
    or if --json is given."""
    return is_asked or not sys.stdout.isatty()


def _end_silence() -> None:
    global _silent_since
    _silent_since = monotonic()


def note(text: str, *, is_asked: bool = False) -> None:
    """Print a note in grey. With --quiet, only notes that the user has requested (`is_asked`) are printed."""
    if is_asked or not _is_quiet:
        _end_silence()
        errors().print(f"[dim]{escape(as_options(text))}[/dim]", soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning, also with --quiet."""
    _end_silence()
    errors().print(f"[yellow]warning:[/yellow] {escape(as_options(text))}", soft_wrap=True)


def warn_once(subject: str, text: str) -> None:
    """Print a warning, unless this command has already warned about this subject."""
    if subject not in _warned:
        _warned.add(subject)
        warn(text)


def print_error(text: str) -> None:
    """Print an error in one line."""
    errors().print(f"[bold red]error:[/bold red] {escape(text)}", soft_wrap=True)


def complain(error: SmoeError, commands: Sequence[str] = ()) -> None:
    """Print an error, then hints, then the commands that prepare missing files or measurements (if there are any)."""
    print_error(words_of(error))
    console = errors()
    model = "MODEL" if error.model is None else shlex.quote(error.model)
    hints = [hint.format(model=model) for kind, hint in _HINTS.items() if isinstance(error, kind)]
    if isinstance(error, ContextError) and not error.is_by_budget:
        hints.clear()
    if isinstance(error, BudgetError) and error.setting != "worker_memory":
        without = _in_words(_not_of_plans())
        hints.append(f"smoe plan {model}{_sequences_typed()}, without {without}, shows what each budget buys.")
    hints += [*_of_preset(error), *_of_text(error)]
    for hint in hints:
        console.print(f"[bold]hint:[/bold] {escape(hint)}", soft_wrap=True)
    if commands:
        console.print("[bold]to make it work:[/bold]")
    for line in commands:
        console.print(f"  {line}", soft_wrap=True, markup=False)


def _of_preset(error: SmoeError) -> list[str]:
    """Return a hint that the refused setting comes from a preset; empty if the user typed the setting."""
    preset, setting = typed_value(["--preset"]) or "", error.setting or ""
    value = PRESETS.get(preset, {}).get(setting)
    option = option_of(setting)
    if value is None or any(word.partition("=")[0] == option or f"{setting}=" in word for word in sys.argv):
        return []
    return [f"{_typed(setting, in_words(value))} comes from --preset {preset}."]


def _of_text(error: SmoeError) -> list[str]:
    """Return a hint that the argument of `smoe generate` is a model, if the user gave a text instead."""
    given = str(error.given)
    if error.setting != "model" or sys.argv[1:2] != ["generate"] or " " not in given or "/" in given:
        return []
    return [f"to continue this text: smoe generate MODEL -p {shlex.quote(given)}"]


def _sequences_typed() -> str:
    """Return the option `--max-sequences N` for the command `smoe plan` that is suggested after an error, if the failed
    command serves several texts; else an empty text."""
    if sys.argv[1:2] != ["serve"]:
        return ""
    return f" --max-sequences {typed_value(['--max-sequences']) or SERVED_SEQUENCES}"


def _not_of_plans() -> list[str]:
    """Return the options that the user typed and that must be left out of the suggested command `smoe plan`: those that
    it does not accept, and --memory."""
    typed = {option: typed_value([option]) for option in ("--cluster", "--preset", "--prefetch")}
    refused = {"--preset": ("cluster", "od-moe"), "--prefetch": (DRAFT,)}
    return ["--memory"] + [
        option if option == "--cluster" else f"{option} {value}"
        for option, value in typed.items()
        if value is not None and value in refused.get(option, (value,))
    ]


def _in_words(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@contextmanager
def progress(command: str = "", unit: str = "", clock: Callable[[], float] = monotonic) -> Iterator[Progress]:
    """Show progress bars on stderr, which disappear at the end of the `with` block. If stderr is no terminal, print a
    line now and then instead.

    Both show the time left. Lines begin with the name of the command. A task counts in `unit` unless it has an
    `amount`. The part `skipped` of `completed` was done in an earlier run and does not count for the speed.
    """
    console = errors()
    if _is_quiet:
        bars = Progress(console=console, disable=True)
    elif console.is_terminal:
        texts = TextColumn("{task.description}"), TextColumn("{task.fields[amount]}")
        columns = (texts[0], BarColumn(24), texts[1], TimeElapsedColumn(), _TimeLeft())
        bars = Progress(*columns, console=console, transient=True, get_time=clock)
    else:
        bars = _Lines(command, unit, console, clock)
    with bars:
        yield bars


def _seconds_left(task: Task, elapsed: float) -> float | None:
    """Return how many seconds a task still needs, computed from its speed so far; None if the speed is unknown."""
    done = task.completed - task.fields.get("skipped", 0)
    if task.total is None or done <= 0 or task.completed >= task.total:
        return None
    return float(elapsed * (task.total - task.completed) / done)


class _TimeLeft(ProgressColumn):
    """The column of a progress bar that shows the time left. The time is estimated at every advance of the task, and
    counted down between two advances."""

    def __init__(self) -> None:
        super().__init__()
        self._advances: dict[TaskID, tuple[float, float]] = {}
        """{task: (completed amount, elapsed seconds) at its last advance}."""

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        if self._advances.get(task.id, (-1.0, 0.0))[0] != task.completed:
            self._advances[task.id] = task.completed, elapsed
        advanced = self._advances[task.id][1]
        left = _seconds_left(task, advanced)
        if left is None:
            return Text("")
        return Text(f"{format_remaining(max(0.0, left - (elapsed - advanced)))} left", style="dim")


class _Lines(Progress):
    """Prints progress as lines of a log, at most every ten seconds: `eval: alpha 0.3, 412 of 1,200 tokens, 3 min
    left`."""

    def __init__(self, command: str, unit: str, console: Console, clock: Callable[[], float]) -> None:
        super().__init__(console=console, disable=True, get_time=clock)
        self._start = f"{command}: " if command else ""
        self._unit = unit
        self._printed_at = clock()

    def update(self, task_id: TaskID, *args: Any, **changes: Any) -> None:
        super().update(task_id, *args, **changes)
        if self.get_time() - self._printed_at >= _LINE_SECONDS:
            self._printed_at = self.get_time()
            note(self._start + ", ".join(self._parts(self._tasks[task_id])))

    def _parts(self, task: Task) -> Iterator[str]:
        yield task.description
        if task.fields["amount"]:
            yield task.fields["amount"]
        elif task.total is not None:
            yield f"{max(0, task.completed):,.0f} of {task.total:,.0f} {self._unit}".rstrip()
        elif task.elapsed:  # else every line would be the same
            yield f"{format_remaining(task.elapsed)} so far"
        left = _seconds_left(task, task.elapsed or 0.0)
        if left is not None:
            yield f"{format_remaining(left)} left"


class Patience:
    """Shows what is being done, if it takes long: on a terminal a line that disappears when it ends, elsewhere one line
    if nothing was printed for some seconds, and a further one every ten seconds.

    `amount()` returns (bytes done, all bytes), or None as long as they are unknown; then only `title` is shown.
    """

    def __init__(self, title: str, amount: Callable[[], tuple[int, int] | None] = lambda: None) -> None:
        self.title = title
        self._amount = amount
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, name="smoe-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Remove the line; afterwards the caller may use the terminal. Repeated calls have no effect."""
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _show(self) -> None:
        is_terminal = errors().is_terminal
        while not is_terminal and (left := _silent_since + _SILENT_SECONDS - monotonic()) > 0:
            if self._done.wait(left):
                return
        if self._done.wait(_PATIENCE_SECONDS if is_terminal else 0):
            return
        with progress() as bars:
            state = self._state()
            task = bars.add_task(self.title, **({"total": None} | state))
            if not is_terminal:
                note(", ".join(part for part in (self.title, state["amount"]) if part))
            while not self._done.wait(0.2):
                bars.update(task, **self._state())

    def _state(self) -> dict[str, Any]:
        amount = self._amount()
        if amount is None:
            return {"amount": ""}
        done, total = amount
        return {"completed": done, "total": total, "amount": f"{format_bytes(done)} of {format_bytes(total)}"}


@contextmanager
def doing(title: str) -> Iterator[None]:
    """Show what is being done during the `with` block, if it takes long."""
    bar = Patience(title)
    bar.start()
    try:
        yield
    finally:
        bar.stop()


_SETTING = re.compile(r"`([a-z]+(?:_[a-z]+)*)(?:=([^`]*))?`")


def words_of(error: BaseException) -> str:
    """Return an error's message for a terminal, without an OSError's number."""
    if isinstance(error, OSError) and len(error.args) >= 2:
        text = f"{error.args[1]}: {error.filename}" if error.filename else str(error.args[1])
    else:
        text = explain_mistyped(error) if is_mistyped(error) else str(error)
    return as_options(text)


def as_options(text: str) -> str:
    """Return a message of the library in which settings are replaced by options of the command line: `precision=int4`
    by --precision int4."""
    return _SETTING.sub(lambda found: _typed(found[1], found[2]), text)


def _typed(setting: str, value: str | None) -> str:
    """Return the option that gives a setting this value. None: the option without a value."""
    option = option_of(setting)
    if value is None or setting == "count":  # --process-memory gives both `count` and `memory`
        return option
    return f"{option}={value}" if option.startswith("--set") else f"{option} {value}"
