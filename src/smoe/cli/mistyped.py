"""Explains a command line that the parser of options has refused, in the words of smoe's other errors.

The parser's exceptions are recognised by their attributes, because typer has its own copies of click's classes.
"""

from __future__ import annotations

import re
import shlex
from difflib import get_close_matches
from typing import Any

from smoe.cli.typed_value import typed_value

_ELSEWHERE = {
    "-n": "--max-new-tokens",
    "--n-predict": "--max-new-tokens",
    "--max-tokens": "--max-new-tokens",
    "--tokens": "--max-new-tokens",
    "--num-predict": "--max-new-tokens",
    "--ram": "--memory",
    "--budget": "--memory",
    "-c": "--context",
    "--ctx-size": "--context",
    "-t": "--threads",
    "--temp": "--temperature",
    "-f": "--prompt-file",
    "--file": "--prompt-file",
    "-v": "--version",
    "-V": "--version",
}
"""{option of another program: the option of smoe with the same meaning}."""
_COMMANDS_ELSEWHERE = {"run": "chat", "help": "--help", "version": "--version"}
"""{command of another program: the command or option of smoe with the same meaning}."""
_PROMPT_OPTIONS = ("-p", "--prompt")
_UNIT = re.compile(r"[KMGT]?i?B", re.IGNORECASE)
_SIZE = re.compile(r"[0-9.]+ ?[KMGT]i?B?", re.IGNORECASE)
_MODEL_OPTIONS = ("-m", "--model")
"""Options with which other programs are given the model."""
_NO_COMMAND = re.compile(r"No such command '(.*?)'\..*", re.DOTALL)
_NEAR = 0.7
"""How similar an option must be to be suggested, from 0 to 1."""
_UNPARSED = ", unable to parse"
_EXTRA = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", re.DOTALL)
_KINDS = {"a valid integer": "a whole number", "a valid number": "a number"}


def is_mistyped(error: BaseException) -> bool:
    """Return whether the parser of the command line has raised this error."""
    return hasattr(error, "exit_code") and hasattr(error, "format_message")


def is_help(error: BaseException) -> bool:
    """Return whether the error means that a command without arguments has printed its help."""
    return type(error).__name__ == "NoArgsIsHelpError"


def explain_mistyped(error: Any) -> str:
    """Return what is wrong with a command line, and where its options are listed."""
    context = getattr(error, "ctx", None)
    if context is None:
        return _what(error, None)
    return f"{_what(error, context)}; {context.command_path} --help lists the {_listed(context)}"


def allowed_value(error: Any) -> str:
    """Return which values the refused option or argument may have."""
    kind = str(error.message).removeprefix("Input should be ").partition(_UNPARSED)[0]
    return _KINDS.get(kind, kind) or "must be given"


def _what(error: Any, context: Any) -> str:
    name, parameter = getattr(error, "option_name", None), getattr(error, "param", None)
    if name is not None and hasattr(error, "possibilities"):
        return f"the option {name} is unknown{_meant_option(name, error.possibilities, context)}"
    if name is not None:
        return f"{name} needs a value"
    if parameter is not None and str(error.message).startswith("Input should be "):
        return f"{_named(parameter)} is {_given(error)}; it must be {allowed_value(error)}"
    if parameter is not None and not error.message:
        return f"{_named(parameter)} is missing"
    extra = _EXTRA.fullmatch(str(error.message))
    if extra is not None:
        return f"unexpected argument {extra[1]!r}{_as_option(extra[1], context)}"
    command = _NO_COMMAND.fullmatch(str(error.format_message()))
    if command is not None and context is not None:
        return f"no such command {command[1]!r}{_meant_command(command[1], context)}"
    text = str(error.format_message()).rstrip(".")
    return text[:1].lower() + text[1:]


def _as_option(given: str, context: Any) -> str:
    """Return how to give an argument by an option: a size as the memory, or a text as a prompt if the command takes
    prompts. Return an empty text for other arguments."""
    known = _options_of(context)
    if _UNIT.fullmatch(given):
        return f"; a size has no space before its unit, such as 8{given}"
    if _SIZE.fullmatch(given) and "--memory" in known:
        return f"; to give it as the memory budget: --memory {shlex.quote(given.replace(' ', ''))}"
    return f"; to give it as a prompt: -p {shlex.quote(given)}" if "--prompt" in known else ""


def _options_of(context: Any) -> list[str]:
    parameters = [] if context is None else context.command.params
    return [option for each in parameters for option in each.opts if option.startswith("-")]


def _of_a_command(name: str, context: Any) -> str:
    """Return an example of an option that stands before the command, and belongs behind it; empty if no command has
    this option."""
    commands = getattr(context.command, "commands", {}) if context is not None else {}
    owner = next((each for each in commands if any(name in own.opts for own in commands[each].params)), None)
    if owner is None:
        return ""
    value = typed_value([name])
    words = [context.command_path, "generate" if "generate" in commands else owner, name, value]
    return f" before a command; give it after one: {' '.join(shlex.quote(word) for word in words if word)}"


def _listed(context: Any) -> str:
    return "commands" if hasattr(context.command, "commands") else "options"


def _named(parameter: Any) -> str:
    is_option = any(option.startswith("-") for option in parameter.opts)
    return max(parameter.opts, key=len) if is_option else str(parameter.metavar or parameter.name).upper()


def _given(error: Any) -> str:
    value = typed_value(error.param.opts)
    return "not valid" if value is None else repr(value)


def _meant_command(name: str, context: Any) -> str:
    """Return a suggestion: the command with the same meaning, or one with a similar name; empty if there is none."""
    near = get_close_matches(name, context.command.commands, n=1, cutoff=_NEAR)
    meant = _COMMANDS_ELSEWHERE.get(name) if context.parent is None else None
    return f" (did you mean {meant or near[0]}?)" if meant or near else ""


def _meant_option(name: str, possibilities: Any, context: Any) -> str:
    """Return a suggestion: the option with the same meaning, or one with a similar name; empty if there is none."""
    parameters = [] if context is None else context.command.params
    if name in _MODEL_OPTIONS and any(each.name == "model" for each in parameters):
        model = shlex.quote(typed_value([name]) or "demo")
        return f": the model is given without an option: {context.command_path} {model}"
    known = _options_of(context)
    if name in _PROMPT_OPTIONS and "--prompt" not in known and any(each.name == "model" for each in parameters):
        return f"; a prompt is an option of smoe generate: smoe generate -p {shlex.quote(typed_value([name]) or '...')}"
    meant = _ELSEWHERE.get(name)
    elsewhere = "" if meant in known else _of_a_command(name, context)
    if elsewhere:
        return elsewhere
    found = [meant] if meant in known else get_close_matches(name, [*known, *(possibilities or ())], n=1, cutoff=_NEAR)
    return f" (did you mean {found[0]}?)" if found else ""
