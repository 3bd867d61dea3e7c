"""`smoe launch`: starts a coding agent, or another program, with a server of a model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO, Annotated, Any

import typer

from smoe.cli.programs import PROGRAMS, Program, RunningServer, program_of
from smoe.errors import ConfigError, SmoeError, suggested

EPILOG = """Examples:

smoe launch claude ./my-moe --memory 8GiB --context 32768

smoe launch aider ./my-moe --memory 8GiB -- --no-auto-commits notes.py

smoe launch codex            # with a server that runs already on port 8000

The server's options are those of smoe serve; the program's follow after --.
The program gets the server by environment variables and its own options; no
file is changed. A server that is started here ends with the program.
"""
_PORT = 8000
_LOOK_SECONDS = 5.0
_NO_KEY = "none"
_TAIL = 2000
"""The number of last characters of the server's log that an error message shows."""


def command(
    context: typer.Context,
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help=f"Program to start: {', '.join(PROGRAMS)}, or any other command.")
    ] = "",
) -> None:
    """Start a coding agent, or another program, that uses a model.

    smoe launch PROGRAM [MODEL] [OPTIONS OF smoe serve] [-- ARGUMENTS OF PROGRAM]

    Uses the server of smoe that runs on this port (--port, by default 8000), or starts smoe serve with the model and
    options, and ends it with the program.
    """
    if not program:
        raise ConfigError(
            f"smoe launch needs a program to start: {', '.join(PROGRAMS)}, or any other command on PATH; for example: "
            "smoe launch claude ./my-moe --memory 8GiB",
            setting="program",
            allowed="a command on PATH",
        )
    given, own = _divided(context.args)
    if {"-h", "--help"} & set(given):
        print(context.get_help())
        return
    found = program_of(program)
    executable = _executable(found)
    with _server(program, given) as served:
        raise typer.Exit(_run([executable, *found.arguments(served), *own], found.environment(served)))


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the command line at `--`. Return the server's arguments, and the arguments of the program."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:place]), list(arguments[place + 1 :])


def _executable(program: Program) -> str:
    """Return the path of a program. Raises `ConfigError` where it is not installed."""
    found = shutil.which(program.command)
    if found is not None:
        return found
    given = program.command
    known = f"{', '.join(PROGRAMS)}, or another command on PATH"
    if program.install:
        message = f"the program {given} is not installed (PATH has no such program); install it: {program.install}"
    elif _may_be_model(given):
        message = (
            f"{given!r} is no program; the program stands before the model: smoe launch claude {given} --memory 8GiB"
        )
    else:
        message = f"there is no program {given!r} on PATH{suggested(given, PROGRAMS)}; give {known}"
    raise ConfigError(message, setting="program", given=given, allowed=known)


def _may_be_model(text: str) -> bool:
    """Return whether a text in the place of the program is probably a model: a folder, a GGUF file, or a hub id."""
    is_hub_id = text.count("/") == 1 and not text.startswith((".", "/", "~"))
    return text == "demo" or text.endswith(".gguf") or is_hub_id or Path(text).is_dir()


@contextmanager
def _server(program: str, given: Sequence[str]) -> Iterator[RunningServer]:
    """Yield the server of smoe that runs on the port. If there is none, start a server with the options `given`, and
    end it after the `with` block."""
    port = _value_of(given, "--port") or str(_PORT)
    key = _value_of(given, "--api-key") or os.environ.get("SMOE_API_KEY") or _NO_KEY
    served = _running(f"http://127.0.0.1:{port}", key)
    if served is not None:
        _check_needless(served, given)
        yield served
        return
    if not given or given[0].startswith("-"):
        raise ConfigError(
            f"no server of smoe runs on port {port}; give a model and its budget: smoe launch {program} ./my-moe "
            "--memory 8GiB",
            setting="model",
            given=None,
            allowed="a model, if no server runs",
        )
    with tempfile.TemporaryFile("w+", encoding="utf8", errors="replace") as log, _started(given, log) as process:
        yield _listening(process, log, key)


def _running(url: str, key: str) -> RunningServer | None:
    """Return the server of smoe that listens at an address; None if there is none."""
    import urllib.request  # the other commands, which import this module too, do not need it

    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=_LOOK_SECONDS) as answer:
            models = json.load(answer)["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # nothing listens, or another program: if a server is started, it reports that
    ours = [model for model in models if model.get("owned_by") == "smoe"]
    return RunningServer(url, ours[0]["id"], key, ours[0]["max_model_len"]) if ours else None


def _check_needless(served: RunningServer, given: Sequence[str]) -> None:
    """Raise `ConfigError` if the user gave another model, or --memory, although a server already runs on the port."""
    if given and ((not given[0].startswith("-") and given[0] != served.model) or "--memory" in given):
        raise ConfigError(
            f"a server of {served.model} runs at {served.url} already; to use that server, leave out the model and "
            "its options; to start another server, give another port with --port",
            setting="port",
            given=served.url,
            allowed="a free port, or no model",
        )


@contextmanager
def _started(given: Sequence[str], log: IO[str]) -> Iterator[Popen[str]]:
    """Start `smoe serve`, and end it after the `with` block. The server runs in a session of its own, so that Ctrl-C in
    the terminal does not reach it."""
    from smoe.cli.console import note

    note(f"starting smoe serve {' '.join(given)}")
    line = [sys.executable, "-m", "smoe", "serve", *given, "--json"]
    process = Popen(line, stdout=PIPE, stderr=log, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None, "the server's output is a pipe"
        process.stdout.close()


def _listening(process: Popen[str], log: IO[str], key: str) -> RunningServer:
    """Wait until the server listens. Raises the error that it reports."""
    assert process.stdout is not None, "the server's output is a pipe"
    message: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
    if message.get("event") == "listening":
        url, context_tokens = message["url"].removesuffix("/v1"), message["context_tokens"]
        return RunningServer(url, message["model"], key, context_tokens)
    process.wait()
    log.seek(0)
    why = message.get("error", {}).get("message") or log.read()[-_TAIL:].strip() or f"exit code {process.returncode}"
    raise SmoeError(f"smoe serve did not start: {why}")


def _run(line: Sequence[str], environment: dict[str, str]) -> int:
    """Run the program in this terminal, and return its exit code. Ctrl-C is left to the program; other signals end
    it."""
    from smoe.cli.interrupts import answered_by

    with Popen(line, env={**os.environ, **environment}) as program:

        def answer(number: int) -> None:
            if number != signal.SIGINT:
                program.terminate()

        with answered_by(answer):
            code = program.wait()
    return 128 - code if code < 0 else code


def _value_of(arguments: Sequence[str], option: str) -> str | None:
    """Return the value of an option in a command line; None if the option is not given."""
    for number, each in enumerate(arguments):
        name, _, value = each.partition("=")
        if name == option:
            return value or next(iter(arguments[number + 1 :]), None)
    return None
