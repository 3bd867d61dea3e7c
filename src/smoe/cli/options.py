"""The options that several commands share, each defined once.

A command takes a whole group (`engine: EngineOptions`), whose fields `spread.py` adds to the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from smoe.bounds import EMULATED
from smoe.cli.console import output, print_json, warn_once
from smoe.cli.settings import asks_for_help, described, listing, option_of, settings_of
from smoe.config import DEFAULT_ALPHA, DEFAULTS, SETTINGS, EngineConfig
from smoe.errors import ConfigError
from smoe.presets import PRESETS, configure
from smoe.setting_declaration import ENGINE, MEMORY, Setting
from smoe.units import parse_bytes

Model = Annotated[
    str,
    typer.Argument(
        help="A folder with config.json and safetensors, a GGUF file, a hub id (for a GGUF file of the hub: "
        "OWNER/REPO:Q4_K_M), or demo, a toy that is part of smoe."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (also: SMOE_DEBUG=1).")]


def _list_settings(given: list[str] | None) -> list[str] | None:
    """Print the list of `--set help` and exit; return other values unchanged."""
    if not asks_for_help(given or ()):
        return given
    if "--json" in sys.argv[1:]:
        print_json({"settings": described()})
    else:
        print(listing(min(output().width, 100)))
    raise typer.Exit


_OWN: list[tuple[str, Any, Any]] = [
    (
        "preset",
        Annotated[
            str | None,
            typer.Option(
                help=f"Named set of settings, which other options override: {', '.join(PRESETS)}. \\[default: exact]",
                rich_help_panel=ENGINE,
            ),
        ],
        None,
    ),
    (
        "revision",
        Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.", rich_help_panel=ENGINE)],
        None,
    ),
]
_SET = typer.Option(
    "--set",
    metavar="NAME=VALUE",
    help="A setting that has no option of its own, e.g. prefill_keep=eviction; --set help lists these settings. "
    "Repeatable.",
    rich_help_panel=ENGINE,
    is_eager=True,  # a listing needs no other options
    callback=_list_settings,
)


def _attribute(option: str) -> str:
    """Return the attribute name of a command line option, such as `max_sequences` for `--max-sequences`."""
    return option.removeprefix("--").replace("-", "_")


def _declared(each: Setting) -> tuple[str, Any, Any]:
    """Return the command line option that a setting of `EngineConfig` declares: its name, annotation and default."""
    words = each.help.replace("{allowed}", each.allowed.words)
    option = typer.Option(each.option, metavar=each.form, help=words, rich_help_panel=each.panel)
    kind = each.allowed.option_type
    if kind is bool:
        return _attribute(each.option), Annotated[bool, option], False
    return _attribute(each.option), Annotated[kind | None, option], None


def _fields() -> list[tuple[str, Any, Any]]:
    """Return all options of the engine: those that settings declare, and two others, which come before the panel
    Engine."""
    of_settings = [_declared(each) for each in SETTINGS.values() if each.option]
    first = sum(each.panel == MEMORY for each in SETTINGS.values() if each.option)
    return [*of_settings[:first], *_OWN, *of_settings[first:], ("settings", Annotated[list[str] | None, _SET], None)]


class _Configurable:
    """The base class of a group of engine options. It converts the options to an `EngineConfig`."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **given: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def config(self, sequences: int = 1) -> EngineConfig:
        """Return the engine's configuration for `sequences` prompts at once.

        If no preset is given, an option may imply one (`Setting.implies`). Prints a warning if the preset `exact` is
        given with lossy options.
        """
        if self.alpha and self.preset == "smoe-exact":
            raise ConfigError(
                f"--preset smoe-exact is lossless, and --alpha {self.alpha:g} is lossy; use --preset smoe with "
                "--alpha, or leave out --alpha",
                setting="alpha",
                given=self.alpha,
                allowed="0 with `preset=smoe-exact`",
            )
        if self.profile is not None and self.device != EMULATED:
            raise ConfigError.idle("profile", self.profile, "`device=emulated`")
        if self.memory is not None and self.process_memory is not None:
            raise ConfigError(
                f"--memory {self.memory} and --process-memory {self.process_memory} both set the memory; give one of "
                "them",
                setting="process_memory",
                given=self.process_memory,
                allowed="only without --memory",
            )
        given = {name: self._given(name, each) for name, each in SETTINGS.items() if each.option}
        if self.process_memory is not None:
            given |= {"memory_bytes": parse_bytes(self.process_memory, "memory_bytes"), "count": "process"}
        if self.max_sequences is None:
            given["max_sequences"] = sequences
        preset = _implied(given) if self.preset is None else self.preset
        config = configure(preset, **given, **settings_of(self.settings or ()))
        _refuse_idle_copies(config)
        if self.preset == "exact":
            warn_of_losses([option_of(name) for name in config.lossy_settings])
        return config

    def _given(self, name: str, each: Setting) -> Any:
        """Return the value of a setting's option; None if the option is not given."""
        value = getattr(self, _attribute(each.option))
        if value is None or isinstance(value, bool):
            return value or None
        return each.allowed.parse(name, value)


if TYPE_CHECKING:

    class EngineOptions(_Configurable):
        """The options of the engine: those that settings of `EngineConfig` declare, a preset, and `--set` for all other
        settings."""
else:
    EngineOptions = make_dataclass("EngineOptions", _fields(), bases=(_Configurable,), frozen=True)


def _implied(given: Mapping[str, Any]) -> str:
    """Return the preset of a command line without a preset. `given`: {setting: value}; None stands for an option that
    is not given."""
    values = [
        each.implies for name, each in SETTINGS.items() if each.implies and given[name] not in (None, DEFAULTS[name])
    ]
    return values[-1] if values else "exact"


def warn_of_losses(options: Sequence[str]) -> None:
    """Print a warning about lossy options that are given together with `--preset exact`, if there are any."""
    if options:
        verb = "makes" if len(options) == 1 else "make"
        warn_once(
            "preset",
            f"{' and '.join(options)} {verb} this run lossy: its results are no longer exact, although --preset exact "
            f"is given; for exact results, leave out {' and '.join(options)}",
        )


def in_container(config: EngineConfig) -> EngineConfig:
    """Return the configuration for a command that may use the whole container, on a CPU. If the container has a memory
    limit and no budget was given, the limit is the memory of the process."""
    from smoe.load.device import planned_device
    from smoe.machine.available_memory import container_bytes
    from smoe.machine.device import CPU

    is_given = config.memory_bytes is not None or config.resident_share is not None
    if is_given or config.device == EMULATED or planned_device(config) != CPU:
        return config
    limit = container_bytes()
    return config if limit is None else replace(config, memory_bytes=limit, count="process")


def _refuse_idle_copies(config: EngineConfig) -> None:
    """Raise `ConfigError` if low-precision copies are requested and no other setting would use them."""
    by_thresholds = config.precision_shares is None and not config.prices_answers
    if config.has_low and by_thresholds and config.low_threshold >= config.skip_threshold:
        raise ConfigError(
            f"`low_precision={config.low_precision}` would have no effect: with "
            f"`low_threshold={config.low_threshold:g}` and `skip_threshold={config.skip_threshold:g}`, no expert is "
            "loaded as a low-precision copy; give a lower `low_threshold` such as 0.6, a higher `skip_threshold`, "
            "or `precision_shares` such as 67,30,3",
            setting="low_threshold",
            given=config.low_threshold,
            allowed=f"below {config.skip_threshold:g} with `low_precision`",
        )


def substituting(options: EngineOptions, sequences: int = 1) -> EngineConfig:
    """Return the configuration for a command that tries several alphas. If no preset is given, the preset is smoe.

    Raises `ConfigError` if the user gave an alpha.
    """
    if options.alpha is not None:
        message = "this command sets alpha; leave out --alpha"
        raise ConfigError(message, setting="alpha", given=options.alpha, allowed="no value: the command sets it")
    if options.preset in (None, "exact") and options.low_precision is None:
        options = replace(options, preset="smoe")
    config = replace(options.config(sequences), alpha_as_priced=False)
    return config if config.alpha > 0 else replace(config, alpha=DEFAULT_ALPHA)


def perplexity_share(given: str) -> float:
    """Return the increase of perplexity that the user typed, such as 1%, as a fraction (0.01)."""
    share: float = SETTINGS["max_perplexity_increase"].allowed.parse("max_perplexity_increase", given)
    return share


def check_text(text: str, source: str) -> None:
    """Raise `ConfigError` for text with bytes that are not UTF-8; `source` names where the text comes from."""
    try:
        text.encode("utf8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{source} contains bytes that are not UTF-8, the first of them after {text[: error.start][-20:]!r}; save "
            f"{source} as UTF-8",
            setting=source.removeprefix("--").replace("-", "_"),
            given=ascii(text),
            allowed="text in UTF-8",
        ) from error
