"""`smoe serve`: a model over HTTP, as OpenAI's clients ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoe.cli.options import Debug, EngineOptions, Model
from smoe.errors import ConfigError
from smoe.units import parse_bytes

if TYPE_CHECKING:
    from smoe.server.settings import ServerConfig

EPILOG = """Examples:

smoe serve Qwen/Qwen3-30B-A3B --memory 8GiB

smoe serve ./my-moe --memory 8GiB --context 8192 --max-sequences 8 --port 9000

SMOE_API_KEY=secret smoe serve ./my-moe --memory 8GiB --host 0.0.0.0

OpenAI's clients, and programs that speak to them, take the address that it
says, http://127.0.0.1:8000/v1. docs/serve.md lists what can be asked. Ctrl-C
and SIGTERM let answers that are under way finish.
"""

_SERVER = "Server"
_SEQUENCES = 4
"""Texts decoded together, where nobody says."""


@dataclass(frozen=True)
class ServerOptions:
    """Where it listens, who may ask, and how much."""

    host: Annotated[
        str,
        typer.Option(
            help="Address to listen at; others than loopback need --api-key or --no-auth.", rich_help_panel=_SERVER
        ),
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0: any free one.", rich_help_panel=_SERVER)] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            help="What clients must send; better in the environment, where no list of processes shows it.",
            envvar="SMOE_API_KEY",
            show_envvar=True,
            rich_help_panel=_SERVER,
        ),
    ] = None
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Let everybody ask who reaches --host.", rich_help_panel=_SERVER)
    ] = False
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="A web page's origin that may ask, such as https://chat.example; * for all. Repeatable.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model. \\[default: its id, or its folder's name]", rich_help_panel=_SERVER
        ),
    ] = None
    max_waiting: Annotated[
        int, typer.Option(help="Texts that may wait for a place; then 429.", rich_help_panel=_SERVER)
    ] = 64
    max_body: Annotated[str, typer.Option(help="The largest request.", rich_help_panel=_SERVER)] = "4MiB"
    drain: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How long answers under way may go on after Ctrl-C or SIGTERM.",
            rich_help_panel=_SERVER,
        ),
    ] = 30.0

    def config(self) -> ServerConfig:
        """Raises `ConfigError` for what cannot be, or would let more in than was said."""
        from smoe.server.settings import ServerConfig

        return ServerConfig(
            host=self.host,
            port=self.port,
            api_key=self.api_key,
            no_auth=self.no_auth,
            allow_origin=tuple(self.allow_origin or ()),
            max_waiting=self.max_waiting,
            max_body_bytes=parse_bytes(self.max_body, "max_body"),
            drain_seconds=self.drain,
        )


def command(server: ServerOptions, engine: EngineOptions, model: Model = "demo", debug: Debug = False) -> None:
    """Serve a model over HTTP, as OpenAI's clients ask for it.

    Several are answered at once (--max-sequences; 4 unless said otherwise), each as it would be alone. Listens on this
    machine only, unless told to.
    """
    from smoe.server.installed import check_server

    check_server()
    config = server.config()
    name = _name(server.name, model)
    from smoe.cli.console import note, warn
    from smoe.cli.session import loaded, tokenizer_of
    from smoe.server.listening import Server, address_of, bound
    from smoe.server.serving import Serving

    with bound(config) as door, loaded(model, engine.config(_SEQUENCES), engine.revision) as ready:
        serving = Serving(ready, tokenizer_of(model, engine.revision), name, config)
        if not serving.prompts.has_template:
            note("this model has no chat template: it continues texts (/v1/completions) and cannot be talked with")
        serving.start()
        door.listen()  # before anybody is told of it: who comes before the server looks waits a moment
        try:
            note(f"serving {name} at {address_of(door)}/v1 (Ctrl-C ends it)", is_asked=True)
            Server(serving, partial(note, is_asked=True), warn).run([door])
        finally:
            serving.close()


def _name(given: str | None, model: str) -> str:
    """What clients call the model: an id as it is, of a path the last part."""
    if given is not None and (not given.strip() or not given.isprintable()):
        raise ConfigError.out_of_bounds("name", given, "a name that can be read")
    if given is not None:
        return given
    path = Path(model)
    return (path.resolve().name.removesuffix(".gguf") or model) if path.exists() else model
