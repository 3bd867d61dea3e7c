"""`smoe serve`: serves a model over HTTP with OpenAI's API."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoe.cli.libraries import import_libraries
from smoe.cli.options import Debug, EngineOptions, Json, Model, in_container
from smoe.cli.request_options import ChatTemplate, ParseControlTokens
from smoe.cli.settings import SERVED_SEQUENCES
from smoe.errors import BudgetError, ConfigError
from smoe.garbage import collection_paused
from smoe.units import parse_bytes

if TYPE_CHECKING:
    from smoe.config import EngineConfig
    from smoe.server.serving import Serving
    from smoe.server.settings import ServerConfig
    from smoe.server.totals import Totals

EPILOG = """Examples:

smoe serve Qwen/Qwen3-30B-A3B --memory 8GiB

smoe serve ./my-moe --memory 8GiB --context 8192 --max-sequences 8 --port 9000

SMOE_API_KEY=secret smoe serve ./my-moe --memory 8GiB --host 0.0.0.0

The server prints its address, http://127.0.0.1:8000/v1; enter it in any
program that uses OpenAI's API. To chat, open http://127.0.0.1:8000/ in a
browser. docs/serve.md lists the requests. After
Ctrl-C or SIGTERM responses in flight may finish; a second signal ends them,
and a third exits at once.
"""

_SERVER = "Server"
_SMALLER_CONTEXTS = (2048, 1024, 512, 256)
"""Context lengths that are tried, in order, if the default one does not fit into the budget."""


@dataclass(frozen=True)
class ServerOptions:
    """The options of the server: its address, its keys, and its limits."""

    host: Annotated[
        str,
        typer.Option(
            help="Address on which the server listens. To 127.0.0.1 only programs on this machine can connect; to "
            "0.0.0.0 other machines can connect too, which needs --api-key or --no-auth.",
            rich_help_panel=_SERVER,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(
            help="Port on which the server listens; 0: any free port, which is printed.", rich_help_panel=_SERVER
        ),
    ] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key that clients must send. Setting the environment variable is safer, because other users can "
            "see "
            "the options of a process.",
            envvar="SMOE_API_KEY",
            show_envvar=True,
            rich_help_panel=_SERVER,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File whose only line is the API key, such as a credential of systemd.", rich_help_panel=_SERVER
        ),
    ] = None
    no_auth: Annotated[
        bool,
        typer.Option(
            "--no-auth", help="Answer all clients that can reach --host, without a key.", rich_help_panel=_SERVER
        ),
    ] = False
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may send requests, such as https://chat.example; * for all. Repeatable.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model for clients. \\[default: its id, or the last part of its path without .gguf]",
            rich_help_panel=_SERVER,
        ),
    ] = None
    max_waiting: Annotated[
        int,
        typer.Option(
            help="Number of requests that may wait until the model can process them; further requests get status 429.",
            rich_help_panel=_SERVER,
        ),
    ] = 64
    max_body: Annotated[str, typer.Option(help="Largest size of the body of a request.", rich_help_panel=_SERVER)] = (
        "4MiB"
    )
    max_bodies: Annotated[
        str | None,
        typer.Option(
            help="Memory for the bodies of all requests that wait or are being received; further requests get status "
            "429. "
            "\\[default: 8 x --max-body]",
            rich_help_panel=_SERVER,
        ),
    ] = None
    max_connections: Annotated[
        int,
        typer.Option(
            help="Largest number of open connections; a further one replaces the one that has been idle longest.",
            rich_help_panel=_SERVER,
        ),
    ] = 512
    head_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Time limit for receiving a request's headers.", rich_help_panel=_SERVER),
    ] = 10.0
    body_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Time limit for receiving a request's body.", rich_help_panel=_SERVER),
    ] = 60.0
    idle_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time after which the server closes a connection on which no further request has arrived.",
            rich_help_panel=_SERVER,
        ),
    ] = 30.0
    unread_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time after which the server disconnects a client that has stopped reading its response.",
            rich_help_panel=_SERVER,
        ),
    ] = 60.0
    exit_on_failure: Annotated[
        bool,
        typer.Option(
            "--exit-on-failure",
            help="Exit with code 1 when the model can no longer be used, so that a supervisor starts the server again.",
            rich_help_panel=_SERVER,
        ),
    ] = False
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse requests with unknown fields; otherwise the fields are ignored.",
            rich_help_panel=_SERVER,
        ),
    ] = False
    image_folder: Annotated[
        Path | None,
        typer.Option(
            help="With --images: folder whose files requests may name as file:// URLs; by default no files.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    chat_template: ChatTemplate = None
    parse_control_tokens: ParseControlTokens = False
    drain: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time that responses in flight have to end after Ctrl-C or SIGTERM; then they are cut off.",
            rich_help_panel=_SERVER,
        ),
    ] = 30.0

    def config(self) -> ServerConfig:
        """Return the server's settings. Raises `ConfigError` for invalid ones, or if other machines could connect
        without a key."""
        from smoe.server.settings import ServerConfig

        return ServerConfig(
            host=self.host,
            port=self.port,
            api_key=self._key(),
            no_auth=self.no_auth,
            allow_origin=tuple(self.allow_origin or ()),
            max_waiting=self.max_waiting,
            max_body_bytes=parse_bytes(self.max_body, "max_body"),
            max_bodies_bytes=None if self.max_bodies is None else parse_bytes(self.max_bodies, "max_bodies"),
            max_connections=self.max_connections,
            head_seconds=self.head_timeout,
            body_seconds=self.body_timeout,
            idle_seconds=self.idle_timeout,
            unread_seconds=self.unread_timeout,
            exit_on_failure=self.exit_on_failure,
            parses_control_tokens=self.parse_control_tokens,
            image_folder=self.image_folder,
            is_strict=self.strict,
            drain_seconds=self.drain,
        )

    def template(self) -> str | None:
        """The text of the chat template that replaces the model's own; None: the model's own is used.

        Raises `ConfigError` for an invalid template.
        """
        from smoe.conversation.template_file import read_template

        return None if self.chat_template is None else read_template(self.chat_template)

    def _key(self) -> str | None:
        """Return the key that clients must send. Raises `ConfigError` for a file without a key, or if two keys are
        given."""
        if self.api_key_file is None:
            return self.api_key
        if self.api_key is not None:
            raise ConfigError(
                "`api_key` and `api_key_file` exclude each other; leave out one of the two (the environment "
                "variable SMOE_API_KEY also gives `api_key`)",
                setting="api_key_file",
                given=str(self.api_key_file),
                allowed="none with `api_key`",
            )
        return _key_in(self.api_key_file)


def _key_in(file: Path) -> str:
    """Return the key that a file contains. Raises `ConfigError` if the file cannot be read or contains no valid key."""
    from smoe.server.settings import KEY_FORM, key_fault

    try:
        key = file.read_text(encoding="utf8").strip()
        why = key_fault(key)
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}; give the path of a file with a key"
    except UnicodeDecodeError:
        why = "is not text in UTF-8"
    if why is None:
        return key
    raise ConfigError(
        f"`api_key_file={file}` {why}; {KEY_FORM}",
        setting="api_key_file",
        given=str(file),
        allowed="a file of text whose one line is the key",
    )


def command(
    server: ServerOptions, engine: EngineOptions, model: Model = "demo", json: Json = False, debug: Debug = False
) -> None:
    """Serve a model over HTTP, with a chat page for the browser and the APIs of OpenAI, Anthropic and Ollama.

    Several requests are decoded together (--max-sequences; by default 4), each with the same result as alone up to
    rounding. Listens on this machine only, unless --host is given.
    """
    from smoe.machine.native_heap import bound_heap
    from smoe.server.installed import check_server

    check_server()
    if engine.images:
        from smoe.models.image_families import check_libraries

        check_libraries()
    bound_heap()
    config, template = server.config(), server.template()
    name = _name(server.name, model)
    from smoe.cli.interrupts import at_the_first, exit_code
    from smoe.server.listening_socket import bound

    with at_the_first(), bound(config) as bound_socket:
        totals, failure = _serve(bound_socket, config, name, model, template, engine, json)
        _tell_the_end(totals, json)
        if failure is not None:
            raise failure
        raise typer.Exit(exit_code())


def _serve(
    bound_socket: socket.socket,
    config: ServerConfig,
    name: str,
    model: str,
    template: str | None,
    engine: EngineOptions,
    as_json: bool,
) -> tuple[Totals, Exception | None]:
    """Serve until a signal, or until a failure with `--exit-on-failure`. Return the totals and the failure."""
    from smoe.cli.console import doing, note, warn
    from smoe.cli.interrupts import answered_by

    settings = _with_libraries(model, in_container(engine.config(SERVED_SEQUENCES)), note)
    from smoe.cli.prompt_bar import PromptBar
    from smoe.cli.session import loaded_with_tokenizer
    from smoe.load.last_residents import filling_when_idle
    from smoe.models.files import fetch

    with doing("importing the libraries of the server"), collection_paused():
        from smoe.server.first_pass import first_pass
        from smoe.server.listening import Server
        from smoe.server.listening_socket import opened
        from smoe.server.serving import Serving
        from smoe.server.totals import totals_of

    def warned(text: str) -> None:
        with suppress(OSError):  # the reader may have ended, or the disk may be full: the server continues
            warn(text)

    def print_note(text: str) -> None:
        with suppress(OSError):
            note(text, is_asked=True)

    with loaded_with_tokenizer(model, settings, engine.revision, template) as (ready, tokenizer):
        place = fetch(model, engine.revision)  # now, as it may be gone when the server ends
        serving = Serving(ready, tokenizer, name, config, warned)
        if not serving.prompts.has_template:
            note(
                "this model has no chat template: the server answers requests to /v1/completions, and refuses "
                "requests with a conversation; give a template with --chat-template FILE"
            )
        with doing("computing a first token, which compiles kernels"):
            first_pass(ready, serving.tokenizer)
        listener = Server(serving, print_note, warned)
        with filling_when_idle(place, serving.engine), answered_by(listener.handle_exit):
            serving.start()
            try:
                opened(bound_socket, config)  # before the address is printed: an early client waits a moment
                _tell_where(bound_socket, serving, as_json)
                gc.collect()
                gc.freeze()  # excludes loaded objects from collections, which would delay everything
                with PromptBar(lambda: serving.prefill):
                    listener.run([bound_socket])
            finally:
                serving.close()
        totals = totals_of(serving)
        _store_pace(serving, place)
        return totals, serving.failure if config.exit_on_failure else None


def _store_pace(serving: Serving, place: Path) -> None:
    """Store the times that the server has measured while it decoded one text alone, for the next forecast. `place`: the
    model's path."""
    from smoe.report.pace import UNKNOWN, access_of, arithmetic_of, is_forecast, measured_pace, remember, usable

    engine = serving.engine
    if not is_forecast(engine) or engine.config.has_low:
        return
    access = access_of(engine.ledger, engine.config.direct_io == "on")
    measured = measured_pace(serving.counters_of_one_text, len(engine.store.layers), engine.store.expert_bytes)
    pace = usable(measured, access)
    if pace != UNKNOWN:
        with suppress(OSError):  # the next forecast is then based on earlier runs
            arithmetic = arithmetic_of(engine.config, engine.config.precision)
            remember(place, arithmetic, access, pace, waited=serving.waited_share)


def _with_libraries(model: str, settings: EngineConfig, note: Callable[[str], None]) -> EngineConfig:
    """Import the libraries. Return the engine's settings. If the default context does not fit into the memory budget,
    the settings have a smaller context.

    Raises `BudgetError` if no context fits.
    """
    try:
        import_libraries(model, settings)
        return settings
    except BudgetError:
        if settings.context_tokens is not None:
            raise
        for context in _SMALLER_CONTEXTS:
            smaller = replace(settings, context_tokens=context)
            with suppress(BudgetError, ConfigError):  # the model may have fewer positions
                import_libraries(model, smaller)
                note(
                    f"the default context does not fit in this memory budget; the context of each text is {context} "
                    "tokens instead (see --context)"
                )
                return smaller
        raise


def _tell_where(bound_socket: socket.socket, serving: Serving, as_json: bool) -> None:
    from smoe.cli.console import note, print_json
    from smoe.server.listening_socket import addresses_of

    addresses, config = [f"{address}/v1" for address in addresses_of(bound_socket)], serving.config
    note(f"serving {serving.name} at {' and '.join(addresses)} (Ctrl-C ends it)", is_asked=True)
    for address in addresses_of(bound_socket):
        note(f"chat page: {address}/", is_asked=True)
    if config.no_auth and not config.is_local:
        note("every client that can reach these addresses is answered: no key is required (--no-auth)", is_asked=True)
    if as_json:
        print_json(
            {
                "event": "listening",
                "url": addresses[0],
                "urls": addresses,
                "model": serving.name,
                "context_tokens": serving.engine.context_tokens,
                "max_sequences": serving.engine.config.max_sequences,
                "max_waiting": config.max_waiting,
                "memory_budget_bytes": serving.engine.ledger.budget_bytes,
                "needs_key": config.api_key is not None,
            }
        )


def _tell_the_end(totals: Totals, as_json: bool) -> None:
    from smoe.cli.console import is_quiet, note, print_json
    from smoe.cli.interrupts import print_interrupted, was_interrupted

    if was_interrupted():
        print_interrupted()
    else:
        note("ended", is_asked=True)
    if as_json:
        print_json({"event": "ended", **totals.as_json()})
    elif not is_quiet():
        from smoe.cli.summary import print_totals

        print_totals(totals)


def _name(given: str | None, model: str) -> str:
    """Return the model's name for clients: a hub id unchanged, or the last part of a path without `.gguf`."""
    if given is not None and (not given.strip() or not given.isprintable()):
        raise ConfigError.out_of_bounds("name", given, "a text of printable characters that is not empty")
    if given is not None:
        return given
    path = Path(model).absolute()  # not resolved: a link has a name of its own, its file in a cache may have a hash
    name = path.resolve().name if path.name in ("", "..") else path.name
    return (name.removesuffix(".gguf") or model) if path.exists() else model
