"""`--set NAME=VALUE`: the settings of `EngineConfig` that have no option of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.units import parse_bytes

OPTION_OF = {
    "memory_bytes": "--memory",
    "resident_share": "--resident",
    "host_memory_bytes": "--host-memory",
    "context_tokens": "--context",
}
"""Settings whose option has another name."""
SETTABLE = (
    "alpha_as_priced",
    "balance_order",
    "dense_precision",
    "dilation",
    "direct_io",
    "emulated_expert_bytes",
    "io_threads",
    "prefetch_trial",
    "prefetch_what",
    "prefill_balance",
    "prefill_keep",
    "prefill_tokens",
    "recent_costs",
    "score_window",
    "share_substitutes",
    "substitute_weights",
    "substitutes",
    "turn_timeout_seconds",
)
"""Settings without an option."""
_TRUTH = {"true": True, "false": False, "on": True, "off": False}


def option_of(setting: str) -> str:
    """How a setting of the library is given on the command line."""
    if setting in SETTABLE:
        return f"--set {setting}"
    return OPTION_OF.get(setting, "--" + setting.replace("_", "-"))


def settings_of(given: Sequence[str]) -> dict[str, Any]:
    """`["prefill_keep=eviction"]` -> {"prefill_keep": "eviction"}.

    Raises `ConfigError` for what is no setting, has an option, is given twice or cannot be understood; bounds are
    checked by `EngineConfig`.
    """
    known = {field.name: str(field.type) for field in fields(EngineConfig)}
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"--set is {text!r}; it must be NAME=VALUE, where NAME is one of: {', '.join(SETTABLE)}")
        if name not in known:
            near = get_close_matches(name, SETTABLE, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"--set knows no {name!r}; {hint}there are: {', '.join(SETTABLE)}")
        if name not in SETTABLE:
            raise ConfigError(f"--set {name}: use {option_of(name)}")
        if name in found:
            raise ConfigError(f"--set gives {name} twice, {found[name]!r} and {value!r}; leave one out")
        found[name] = _value(name, known[name], value.strip())
    return found


def _value(name: str, kind: str, text: str) -> Any:
    """The text as what the setting's annotation says."""
    if name.endswith("_bytes"):
        return parse_bytes(text)
    try:
        if "bool" in kind:
            return _TRUTH[text.lower()]
        if "int" in kind:
            return int(text)
        return float(text) if "float" in kind else text
    except (ValueError, KeyError):
        wanted = "true or false" if "bool" in kind else "a whole number" if "int" in kind else "a number"
        raise ConfigError(f"--set {name}={text}: it must be {wanted}") from None
