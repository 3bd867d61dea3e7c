"""Extends the command line of a command: a parameter that is a group of options (`engine: EngineOptions`) is replaced
by the options of the group, and the options that every command has are added."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from smoe.cli.console import speaking
from smoe.cli.interrupts import ending_in_order
from smoe.cli.logs import logged
from smoe.cli.options import EngineOptions, check_text
from smoe.errors import SmoeError

_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result, warnings and errors.")]
_Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Print log lines on stderr; -vv: debug lines as well (or set SMOE_LOG=info or debug).",
    ),
]
_EVERYWHERE: dict[str, tuple[Any, Any]] = {"quiet": (_Quiet, False), "verbose": (_Verbose, 0)}
"""The options of every command, by name: (annotation, default)."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter of a command that is a group of options by the group's options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _parameters_of(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
    for name, (annotation, default) in _EVERYWHERE.items():
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    @functools.wraps(command)
    def spread(**given: Any) -> None:
        if given.get("debug"):
            os.environ["SMOE_DEBUG"] = "1"
        is_quiet, verbosity = given.pop("quiet"), given.pop("verbose")
        with speaking(quietly=is_quiet), logged(verbosity), ending_in_order(as_json=given.get("json", False)):
            for name in ("prompt", "stop"):
                for text in given.get(name) or ():
                    check_text(text, f"--{name}")
            for name, group in groups.items():
                given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
                if isinstance(given[name], EngineOptions):
                    given[name].config()  # refuse bad values before importing anything heavy
            if "model" in hints:
                _refuse_unknown(given)
            try:
                command(**given)
            except SmoeError as error:
                error.concern(given.get("model"))
                raise

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del spread.__wrapped__
    return spread


def _refuse_unknown(given: dict[str, Any]) -> None:
    """Raise an error for a model that does not exist. The function is called before libraries are imported."""
    from smoe.models.files import refuse_unknown

    revisions = [value.revision for value in given.values() if isinstance(value, EngineOptions)]
    refuse_unknown(given["model"], revisions[0] if revisions else given.get("revision"))


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(group)
    ]
