"""`--set NAME=VALUE`: sets fields of `EngineConfig` that have no option of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from smoe.bounds import DEFAULT_PREFETCH_DEPTH, DEFAULT_SHADOW, DEPARTURE, allowed_of
from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.units import parse_bytes

SERVED_SEQUENCES = 4
"""The default number of texts that `smoe serve` decodes together."""
OPTION_OF = {
    "memory_bytes": "--memory",
    "resident_share": "--resident",
    "host_memory_bytes": "--host-memory",
    "context_tokens": "--context",
    "max_body_bytes": "--max-body",
    "max_bodies_bytes": "--max-bodies",
    "head_seconds": "--head-timeout",
    "body_seconds": "--body-timeout",
    "idle_seconds": "--idle-timeout",
    "unread_seconds": "--unread-timeout",
    "drain_seconds": "--drain",
    "count": "--process-memory",
}
"""Settings whose option has another name."""
SETTABLE: dict[str, str] = {
    "alpha_as_priced": "Use the alpha that smoe tune found for the model, where there is one.",
    "balance_order": "Which experts are loaded first where the CPU computes others.",
    "cache_records": "With --eviction multidimensional: count uses in this sequence, or all.",
    "cache_weights": "With --eviction multidimensional: lru, lfu, lhu, fld, e.g. 0.4,0.3,0.2,0.1.",
    "cluster_timeout_seconds": "With --cluster: how long to wait for workers.",
    "cluster_verify": "With --cluster: the share of workers' results recomputed here, such as 1/64.",
    "cluster_workers": "With --cluster: how many workers must be there before the first token.",
    "dense_precision": "Quantised weights other than experts: as stored, or converted to --dtype.",
    "dilation": "With --device emulated: how many times slower than reported it runs.",
    "direct_io": "Bypass the page cache; auto: unless free RAM holds the whole model.",
    "emulated_expert_bytes": "With --device emulated: use the times of experts of this size.",
    "expert_cache": "Experts that stay resident: as many as fit, or one token's choice.",
    "io_threads": "Reading threads; one or two saturate a disk.",
    "lend_reserve": "Memory that activations and positions do not use yet holds experts.",
    "prefetch_asked": "Run expert-mlp and its like before the experts, or concurrently.",
    "prefetch_depth": "With --prefetch stacked-gates, corrected-gates: layers ahead, at most.",
    "prefetch_trial": "Prefetch only while measured times show a gain.",
    "prefetch_what": "Which predicted experts are loaded: those of top score, or all.",
    "prefill_balance": "Where the CPU computes missing experts: let it compute for prompts, too.",
    "prefill_keep": "Experts resident after a prompt: by its last tokens, or by --eviction.",
    "prefill_tokens": "Tokens of all sequences in one step; longer prompts are read in chunks.",
    "placement": "With --cluster: each expert where it finishes first, or workers in turn.",
    "preload": "Read every expert in the background as soon as the model is loaded.",
    "recent_costs": "How many recent loads and computations the balancer averages.",
    "score_window": "With --eviction score: steps over which scores are averaged.",
    "shadow_departure": "With --prefetch shadow: start a token from a prediction, or wait for it.",
    "shadow_on": "With --prefetch shadow: on the coordinator (main) or in the cluster.",
    "shadow_precision": "With --prefetch shadow: the precision of the draft model.",
    "shadow_spares": "With --prefetch shadow: experts predicted in addition, for each layer.",
    "share_substitutes": "In a batch, prefer substitutes that serve several of its sequences.",
    "substitute_weights": "A substitute's routing weight: by its score, or the missing expert's.",
    "substitutes": "How a missing expert of low score is resolved with --alpha.",
    "tpot_seconds": "Resolve misses within this many seconds a token (generate: --tpot).",
    "turn_timeout_seconds": "How long a request waits for another thread's request to end.",
}
"""Settings without an option, each with its meaning in a line."""
_LEFT_OUT = {
    "cache_records": "sequence",
    "cache_weights": "as smoe tune --cache found for the model, else the usual weights",
    "dilation": "as fast as this machine allows",
    "placement": "finish",
    "emulated_expert_bytes": "the model's own",
    "prefetch_asked": "before, or first-expert with --preset duoserve",
    "prefetch_depth": str(DEFAULT_PREFETCH_DEPTH),
    "prefetch_trial": "true with --prefetch auto, else false",
    "preload": "true if the budget holds every expert",
    "shadow_departure": DEPARTURE[0],
    "shadow_on": "cluster if it has a draft model, else main",
    "shadow_precision": DEFAULT_SHADOW,
    "shadow_spares": "0",
    "tpot_seconds": "no bound",
    "turn_timeout_seconds": "no limit",
}
"""Descriptions that replace a default of None."""
_HOW = "--set help lists all names"
_ALIKE = 0.7
"""The similarity from which a name is taken for a mistyped setting."""
_TRUTH = {"true": True, "false": False, "on": True, "off": False}


def option_of(setting: str) -> str:
    """Return how a setting of the library is given on the command line."""
    if setting in SETTABLE:
        return f"--set {setting}"
    return OPTION_OF.get(setting, "--" + setting.replace("_", "-"))


def settings_of(given: Sequence[str]) -> dict[str, Any]:
    """Parse `["prefill_keep=eviction"]` to {"prefill_keep": "eviction"}.

    Raises `ConfigError` for an unknown setting, one that has an option, one given twice, or an invalid value;
    `EngineConfig` checks bounds.
    """
    known = {field.name: str(field.type) for field in fields(EngineConfig)}
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise _refusal(text, f"--set is {text!r}; it must be NAME=VALUE, such as io_threads=2; {_HOW}")
        if name not in known:
            raise _refusal(text, f"unknown --set {name!r};{_did_you_mean(name, known)} {_HOW}")
        if name not in SETTABLE:
            raise _refusal(text, f"--set {name}: use its own option {option_of(name)} instead")
        if name in found:
            raise _refusal(text, f"--set gives {name} twice, {found[name]!r} and {value!r}; leave one out")
        found[name] = value_of(name, known[name], value.strip())
    return found


def _refusal(given: str, message: str) -> ConfigError:
    return ConfigError(message, setting="set", given=given, allowed=f"NAME=VALUE, NAME one of: {', '.join(SETTABLE)}")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion of a setting with a similar name or option; empty where there is none."""
    given = {setting: setting if setting in SETTABLE else option_of(setting) for setting in known}
    given |= {option.strip("-").replace("-", "_"): option for option in given.values() if option.startswith("--")}
    alike = get_close_matches(name, given, n=1, cutoff=_ALIKE)
    return f" did you mean {given[alike[0]]}?" if alike else ""


def value_of(name: str, kind: str, text: str) -> Any:
    """Convert text to the type in a setting's annotation, `kind`. Raises `ConfigError` where that fails."""
    if name.endswith("_bytes"):
        return parse_bytes(text, name)
    try:
        if "bool" in kind:
            return _TRUTH[text.lower()]
        if "tuple" in kind:
            return tuple(float(part) for part in text.split(","))
        if "int" in kind:
            return int(text)
        if "float" in kind:
            above, is_fraction, below = text.partition("/")
            return float(above) / float(below) if is_fraction else float(above)
        return text
    except (ValueError, KeyError, ZeroDivisionError):
        raise ConfigError.out_of_bounds(name, text, allowed_of(name)) from None


def asks_for_help(given: Sequence[str]) -> bool:
    """Return whether `--set help` or `--set ?` was given."""
    return any(text.strip() in ("help", "?") for text in given)


def described() -> list[dict[str, str]]:
    """Return every name for `--set` with its meaning, allowed values and default, in words."""
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    return [
        {
            "name": name,
            "meaning": meaning,
            "allowed": "a size, such as 9MiB" if name.endswith("_bytes") else allowed_of(name),
            "default": _LEFT_OUT[name] if defaults[name] is None else in_words(defaults[name]),
        }
        for name, meaning in SETTABLE.items()
    ]


def in_words(value: Any) -> str:
    """Return a setting's value in the form of the command line."""
    if isinstance(value, tuple):
        return ",".join(f"{part:.3g}" for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def listing(width: int) -> str:
    """Return the text of `--set help`, in lines of `width`."""
    first = "Given as --set NAME=VALUE, any number of times. All other settings have options: see --help."
    lines = textwrap.wrap(first, width)
    for entry in described():
        lines += ["", entry["name"]]
        for text in (entry["meaning"], f"{entry['allowed']} (default: {entry['default']})"):
            lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
