"""The command line `smoe`. Importing this module imports neither torch nor transformers, so `smoe --help` is fast."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from smoe import __version__
from smoe.cli import (
    bench,
    chat,
    cluster,
    doctor,
    eval,
    generate,
    launch,
    pack,
    plan,
    record,
    replay,
    serve,
    simulate,
    trace_plot,
    tune,
    verify,
)
from smoe.cli.console import complain, print_error, print_json_error
from smoe.cli.first_use import commands_for
from smoe.cli.interrupts import REFUSED, listening
from smoe.cli.mistyped import explain_mistyped, is_help, is_mistyped
from smoe.cli.spread import with_options
from smoe.errors import SmoeError, UnpreparedError, WorkerRefusedError

_EPILOG = """Try it:

smoe generate -p "Once upon a time"

smoe plan Qwen/Qwen3-30B-A3B --memory 8GiB

smoe generate ./my-moe --memory 8GiB -p "The capital of France is"

Help for a command: smoe COMMAND --help

Exit codes: 0 success; 1 results are not exact (smoe verify); 2 an error;
3 the coordinator refuses this worker (smoe cluster join); 130 after Ctrl-C,
143 after SIGTERM, 129 after the terminal was closed (SIGHUP); 141 if the
program that reads the output has ended. After a signal, the results so far
are printed and stored.
"""

_CLOSED_PIPE = 141
"""The exit code if the reader of the output has ended, as in shells: 128 + SIGPIPE."""
_NOT_OF_WORKERS = ("torch", "transformers", "safetensors", "gguf", "huggingface_hub")
"""The dependencies of smoe that a worker does not need (requirements-worker.txt)."""


def _paragraphs(text: str | None) -> str:
    """Return a command's docstring for `--help`, without line breaks within paragraphs: the terminal wraps paragraphs
    at its own width."""
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


app = typer.Typer(
    name="smoe",
    help="Run Mixture-of-Experts language models that do not fit in fast memory, within a memory budget that you set.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in (generate, chat, plan, doctor, bench, eval, tune, pack, verify, record, replay, serve, simulate):
    app.command(
        name=_module.__name__.rsplit(".", 1)[1], help=_paragraphs(_module.command.__doc__), epilog=_module.EPILOG
    )(with_options(_module.command))
app.command(
    name="launch",
    help=_paragraphs(launch.command.__doc__),
    epilog=launch.EPILOG,
    options_metavar="",
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
)(launch.command)
_trace = typer.Typer(
    help="Draw pictures of the routing of a recorded run: smoe trace plot.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_trace.command(name="plot", help=_paragraphs(trace_plot.command.__doc__), epilog=trace_plot.EPILOG)(
    with_options(trace_plot.command)
)
app.add_typer(_trace, name="trace")
app.add_typer(cluster.app, name="cluster")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"smoe {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """The options that are given before the command."""


def command_line() -> Any:
    """Return the parser of the command line. Its help lists flags without the type of a value, because they take
    none."""
    parser: Any = typer.main.get_command(app)
    contexts = [typer.Context(parser, **parser.context_settings)]
    for context in contexts:
        command: Any = context.command
        for each in getattr(command, "commands", {}).values():
            contexts.append(typer.Context(each, parent=context, **each.context_settings))
        for option in command.get_params(context):
            if getattr(option, "is_flag", False) or getattr(option, "count", False):
                option.metavar = ""
    return parser


def main() -> None:
    """Run the command `smoe`. An expected error prints one message on stderr and ends with exit code 2; with --json,
    stdout gets an object that describes the error, too."""
    _open_missing_streams()
    as_json = "--json" in sys.argv[1:]
    try:
        with listening():
            try:
                code = command_line()(prog_name="smoe", standalone_mode=False)
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        code = _end_of_reader()
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # for which rich and typer exit with code 1
            raise
        code = _end_of_reader()
    except Exception as error:
        if as_json:
            with suppress(OSError):  # stdout may be what failed
                print_json_error(error)
        if os.environ.get("SMOE_DEBUG", "0") not in ("", "0"):
            raise
        code = _explain(error)
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> int:
    """Print an error that a command has raised, and return the exit code. An unexpected error is raised again."""
    if isinstance(error, SmoeError):
        complain(error, commands_for(error) if isinstance(error, UnpreparedError) else ())
        return REFUSED if isinstance(error, WorkerRefusedError) else 2
    if isinstance(error, OSError):
        _let_go_of_stdout()  # its buffer may be what failed
        print(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
    elif isinstance(error, ModuleNotFoundError) and error.name in _NOT_OF_WORKERS:
        print(
            f"error: the package {error.name} is not installed; without it this machine can only be a worker of a "
            "cluster "
            f"(smoe cluster join); to run other commands: pip install {error.name}",
            file=sys.stderr,
        )
    elif is_mistyped(error):
        if not is_help(error):
            print_error(explain_mistyped(error))
        return 2
    else:
        raise error
    return 2


def _end_of_reader() -> int:
    """Return the exit code if the program that reads the output has ended. No message is printed."""
    _let_go_of_stdout()
    return _CLOSED_PIPE


def _open_missing_streams() -> None:
    """Replace a closed stdout or stderr (`>&-`) by a stream that discards its input. Let streams with narrow encodings
    replace characters. On Windows, files and pipes get UTF-8, unless PYTHONIOENCODING is set."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf8"))
        elif (stream.encoding or "").lower().replace("-", "") != "utf8" and hasattr(stream, "reconfigure"):
            is_file = sys.platform == "win32" and not stream.isatty() and "PYTHONIOENCODING" not in os.environ
            stream.reconfigure(encoding="utf8" if is_file else None, errors="replace")


def _let_go_of_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
