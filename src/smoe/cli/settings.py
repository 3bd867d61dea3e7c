"""`--set NAME=VALUE`: sets fields of `EngineConfig` that have no option of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from smoe.config import DEFAULTS, SETTINGS
from smoe.errors import ConfigError
from smoe.former_names import present_name, present_value

SERVED_SEQUENCES = 4
"""The default number of texts that `smoe serve` decodes together."""
OPTION_OF = {
    "max_body_bytes": "--max-body",
    "max_bodies_bytes": "--max-bodies",
    "head_seconds": "--head-timeout",
    "body_seconds": "--body-timeout",
    "idle_seconds": "--idle-timeout",
    "unread_seconds": "--unread-timeout",
    "drain_seconds": "--drain",
} | {name: each.option for name, each in SETTINGS.items() if each.option}
"""{setting: its option}, for settings whose option has another name than the setting."""
SETTABLE = sorted(name for name, each in SETTINGS.items() if not each.option)
"""The settings that have no option of their own, and are given by --set."""
_HOW = "--set help lists all names"
_ALIKE = 0.7
"""The similarity of two names, from 0 to 1, above which one counts as a misspelling of the other."""


def option_of(setting: str) -> str:
    """Return the option of the command line with which a setting is given."""
    if setting in SETTABLE:
        return f"--set {setting}"
    return OPTION_OF.get(setting, "--" + setting.replace("_", "-"))


def settings_of(given: Sequence[str]) -> dict[str, Any]:
    """Return {setting: value} from the texts NAME=VALUE of the option --set.

    Raises `ConfigError` for an unknown setting, a setting that has an option of its own, a setting given twice, or an
    invalid value. Bounds are checked by `EngineConfig`.
    """
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = present_name(name.strip().replace("-", "_"))
        if not equals or not name:
            raise _refusal(text, f"--set is {text!r}; it must be NAME=VALUE, such as io_threads=2; {_HOW}")
        if name not in SETTINGS:
            raise _refusal(text, f"unknown --set {name!r};{_did_you_mean(name)} {_HOW}")
        if name not in SETTABLE:
            raise _refusal(text, f"--set {name}: use its own option {option_of(name)} instead")
        if name in found:
            raise _refusal(text, f"--set gives {name} twice, {found[name]!r} and {value!r}; leave one out")
        found[name] = SETTINGS[name].allowed.parse(name, present_value(name, value.strip()))
    return found


def _refusal(given: str, message: str) -> ConfigError:
    return ConfigError(message, setting="set", given=given, allowed=f"NAME=VALUE, NAME one of: {', '.join(SETTABLE)}")


def _did_you_mean(name: str) -> str:
    """Return a suggestion of a setting with a similar name or option; empty if no name is similar."""
    given = {setting: setting if setting in SETTABLE else option_of(setting) for setting in SETTINGS}
    given |= {option.strip("-").replace("-", "_"): option for option in given.values() if option.startswith("--")}
    alike = get_close_matches(name, given, n=1, cutoff=_ALIKE)
    return f" did you mean {given[alike[0]]}?" if alike else ""


def asks_for_help(given: Sequence[str]) -> bool:
    """Return whether `--set help` or `--set ?` was given."""
    return any(text.strip() in ("help", "?") for text in given)


def described() -> list[dict[str, str]]:
    """Return, for each setting of --set: its name, meaning, allowed values and default, in words."""
    return [
        {
            "name": name,
            "meaning": SETTINGS[name].help,
            "allowed": SETTINGS[name].allowed.typed,
            "default": default_in_words(name),
        }
        for name in SETTABLE
    ]


def default_in_words(name: str) -> str:
    """Return a setting's default as it would be typed on the command line."""
    return SETTINGS[name].left_out if DEFAULTS[name] is None else in_words(DEFAULTS[name])


def in_words(value: Any) -> str:
    """Return a setting's value as it would be typed on the command line."""
    if isinstance(value, tuple):
        return ",".join(f"{part:.3g}" for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def listing(width: int) -> str:
    """Return the text of `--set help`, in lines of `width` characters."""
    first = "Given as --set NAME=VALUE, any number of times. All other settings have options: see --help."
    lines = textwrap.wrap(first, width)
    for entry in described():
        lines += ["", entry["name"]]
        for text in (entry["meaning"], f"{entry['allowed']} (default: {entry['default']})"):
            lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
