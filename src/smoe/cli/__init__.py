"""The command line. Importing it loads neither torch nor transformers: `smoe --help` answers at once."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from smoe import __version__
from smoe.cli import bench, chat, doctor, eval, generate, pack, plan, record, replay, tune, verify
from smoe.cli.options import with_options
from smoe.errors import SmoeError

_EPILOG = """Try it:

smoe generate -p "Once upon a time"

smoe plan Qwen/Qwen3-30B-A3B --memory 8GiB

smoe generate ./my-moe --memory 8GiB -p "The capital of France is"

Every command explains itself: smoe COMMAND --help
"""


def _paragraphs(text: str | None) -> str:
    """A docstring without its line breaks inside paragraphs: the terminal has its own width."""
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


app = typer.Typer(
    name="smoe",
    help="Run Mixture-of-Experts language models that do not fit in fast memory: exactly, inside a memory budget.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in (generate, chat, plan, doctor, bench, eval, tune, pack, verify, record, replay):
    app.command(
        name=_module.__name__.rsplit(".", 1)[1], help=_paragraphs(_module.command.__doc__), epilog=_module.EPILOG
    )(with_options(_module.command))


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"smoe {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """What comes before the command."""


def main() -> None:
    """The `smoe` command: an error that smoe foresees is one message on stderr and exit code 2."""
    try:
        app(prog_name="smoe")
    except SmoeError as error:
        if os.environ.get("SMOE_DEBUG", "0") not in ("", "0"):
            raise
        from smoe.cli.console import complain

        complain(error)
        sys.exit(2)
    except BrokenPipeError:
        _let_go_of_stdout()  # whoever read us has left; so do we, quietly
        sys.exit(1)
    except OSError as error:
        if os.environ.get("SMOE_DEBUG", "0") not in ("", "0"):
            raise
        _let_go_of_stdout()  # what it still holds may be what failed
        print(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        sys.exit(2)


def _let_go_of_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
