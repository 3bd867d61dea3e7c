"""The options that several commands share, each defined once.

A command takes a whole group (`engine: EngineOptions`), whose fields `spread.py` adds to the command line.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from smoe.bounds import DTYPES, EMULATED, KERNELS
from smoe.cli.console import output, print_json
from smoe.cli.settings import asks_for_help, described, listing, settings_of, value_of
from smoe.config import DEFAULT_ALPHA, EngineConfig
from smoe.errors import ConfigError
from smoe.plug_ins import PLACE
from smoe.policy.balance import BALANCE
from smoe.policy.registry import ONLINE_EVICTION, POOLS, PREFETCH
from smoe.presets import PRESETS, configure
from smoe.units import parse_bytes, parse_share

_MEMORY = "Memory"
_ENGINE = "Engine"
_LOW = "Low copies of missing experts (HOBBIT)"

Model = Annotated[
    str,
    typer.Argument(
        help="'demo', a folder with config.json and safetensors, a GGUF file, or a hub id (GGUF: ID:Q4_K_M)."
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


@dataclass(frozen=True)
class EngineOptions:
    """The options of the engine: the fields of `EngineConfig` that a command line needs."""

    memory: Annotated[
        str | None,
        typer.Option(
            help="The memory budget, e.g. 8GiB. Default: the free memory less a margin.", rich_help_panel=_MEMORY
        ),
    ] = None
    process_memory: Annotated[
        str | None,
        typer.Option(
            help="Instead: the most that the whole process takes, interpreter and libraries included.",
            rich_help_panel=_MEMORY,
        ),
    ] = None
    resident: Annotated[
        str | None,
        typer.Option(
            help="Instead of --memory: a budget that keeps this share of the experts in memory, e.g. 40%.",
            rich_help_panel=_MEMORY,
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(help="Pinned host memory on a GPU machine, e.g. 16GiB.", rich_help_panel=_MEMORY),
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            help="Positions reserved for every sequence. \\[default: 4096, or the model's own]", rich_help_panel=_MEMORY
        ),
    ] = None
    max_sequences: Annotated[
        int | None,
        typer.Option(
            help="Sequences that run together. \\[default: the number of prompts; smoe serve: 4]",
            rich_help_panel=_MEMORY,
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda, cuda:1, emulated (for tests of schedules). \\[default: the first GPU]",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    threads: Annotated[int | None, typer.Option(help="Compute threads.", rich_help_panel=_ENGINE)] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Type to compute in: {', '.join(DTYPES)}; auto is the checkpoint's own.", rich_help_panel=_ENGINE
        ),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            help="LOSSY: the experts in fewer bits, as smoe pack --precision wrote them: int8, int4, int3, int2.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    activations: Annotated[
        str | None,
        typer.Option(
            help="Activations that are multiplied with quantised weights on a CPU: int8 (8 bits), dtype (the model's "
            "own type). Default: the faster one; int8 only where its kernels pass a self-test.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model.", rich_help_panel=_ENGINE)
    ] = None
    preset: Annotated[
        str, typer.Option(help=f"Named set of settings: {', '.join(PRESETS)}.", rich_help_panel=_ENGINE)
    ] = "exact"
    eviction: Annotated[
        str | None,
        typer.Option(
            help=f"Which resident expert is evicted first: {', '.join(ONLINE_EVICTION)}, or a plug-in's {PLACE}.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    pools: Annotated[
        str | None,
        typer.Option(
            help=f"One pool of slots for all layers, or one for each layer: {', '.join(POOLS)}.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    prefetch: Annotated[
        str | None,
        typer.Option(
            help=f"How the next experts are predicted and loaded early: {', '.join(PREFETCH)}, or a plug-in's {PLACE}.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    balance: Annotated[
        str | None,
        typer.Option(
            help=f"With a GPU: which missing experts the CPU computes: {', '.join(BALANCE)}.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Name of a cluster (smoe cluster up) whose workers compute the experts missing on this machine.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option(
            help="With --device emulated: the device whose times are emulated (rtx-a6000, rtx-4060-ti, ... or a JSON "
            "file). With smoe plan: the machine to forecast for.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    kernels: Annotated[
        str | None,
        typer.Option(
            help=f"Kernels for products of few rows and attention of one token: {', '.join(KERNELS)}. native gives "
            "torch's bits; own-order adds in another order: equal up to rounding, and faster in RAM.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    alpha: Annotated[
        float | None,
        typer.Option(
            help="LOSSY above 0: replace missing experts of low score by resident ones (0.3 is usual). Without a "
            "preset it means --preset smoe with this alpha. Default of --preset smoe: the alpha that smoe tune "
            "found for the model, else 0.3.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    low_precision: Annotated[
        str | None,
        typer.Option(
            help="LOSSY: missing experts of little importance are loaded in fewer bits, as smoe pack --precision "
            "wrote them: int8, int4, int3, int2. Without a preset it means --preset hobbit with this precision.",
            rich_help_panel=_LOW,
        ),
    ] = None
    low_share: Annotated[
        str | None,
        typer.Option(help="Share of the slots' bytes for low-precision copies. \\[default: 15%]", rich_help_panel=_LOW),
    ] = None
    precision_shares: Annotated[
        str | None,
        typer.Option(
            metavar="OWN,LOW,NONE",
            help="Per cent of a token's experts that are computed in full precision, in low precision, not at all; by "
            "the model's profile (smoe tune --shares). With --preset hobbit 67,30,3.",
            rich_help_panel=_LOW,
        ),
    ] = None
    low_threshold: Annotated[
        float | None,
        typer.Option(
            help="Instead of --precision-shares: use a low-precision copy above this unimportance (T1), 0 to 1.",
            rich_help_panel=_LOW,
        ),
    ] = None
    skip_threshold: Annotated[
        float | None,
        typer.Option(help="LOSSY: drop a missing expert above this unimportance (T2).", rich_help_panel=_LOW),
    ] = None
    max_perplexity_increase: Annotated[
        str | None,
        typer.Option(
            help="LOSSY: resolve every miss in the cheapest way within this quality cost, such as 1%: a substitute, a "
            "low-precision copy, the CPU, loading the expert, dropping it (needs smoe tune --prices). With smoe "
            "tune: the bound for alpha.",
            rich_help_panel=_LOW,
        ),
    ] = None
    low_meanwhile: Annotated[
        bool,
        typer.Option(
            "--low-meanwhile",
            help="Use a low-precision copy in memory for important experts, too, while the full ones are read.",
            rich_help_panel=_LOW,
        ),
    ] = False
    upgrade: Annotated[
        bool,
        typer.Option(
            "--upgrade",
            help="While the disk is idle, load the full copies of experts that were computed in low precision.",
            rich_help_panel=_LOW,
        ),
    ] = False
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any other setting, e.g. prefill_keep=eviction; --set help lists them all. Repeatable.",
            rich_help_panel=_ENGINE,
            is_eager=True,  # a listing needs no other options
            callback=_list_settings,
        ),
    ] = None
    reproducible: Annotated[
        bool,
        typer.Option(
            "--reproducible",
            help="Write the same text every time, also with --alpha; impossible with --preset balanced.",
            rich_help_panel=_ENGINE,
        ),
    ] = False

    def config(self, sequences: int = 1) -> EngineConfig:
        """Return the engine's configuration for `sequences` prompts at once.

        Without a preset, an alpha implies the smoe preset, a perplexity bound the balanced preset, and low copies the
        hobbit preset.
        """
        if self.alpha and self.preset == "smoe-exact":
            raise ConfigError(
                f"--preset smoe-exact is exact, --alpha {self.alpha:g} is not; use --preset smoe, or leave one out",
                setting="alpha",
                given=self.alpha,
                allowed="0 with `preset` smoe-exact",
            )
        if self.profile is not None and self.device != EMULATED:
            raise ConfigError.idle("profile", self.profile, "`device` emulated")
        if self.memory is not None and self.process_memory is not None:
            raise ConfigError(
                f"--memory {self.memory} and --process-memory {self.process_memory} both set the memory; give one of "
                "them",
                setting="process_memory",
                given=self.process_memory,
                allowed="only without --memory",
            )
        memory = self.process_memory or self.memory
        config = configure(
            self._preset,
            memory_bytes=parse_bytes(memory, "memory_bytes") if memory is not None else None,
            count="process" if self.process_memory is not None else None,
            resident_share=parse_share(self.resident, "resident_share") if self.resident is not None else None,
            host_memory_bytes=(
                parse_bytes(self.host_memory, "host_memory_bytes") if self.host_memory is not None else None
            ),
            context_tokens=self.context,
            max_sequences=self.max_sequences if self.max_sequences is not None else sequences,
            low_share=parse_share(self.low_share, "low_share") if self.low_share is not None else None,
            precision_shares=(
                value_of("precision_shares", "tuple", self.precision_shares)
                if self.precision_shares is not None
                else None
            ),
            max_perplexity_increase=(
                None if self.max_perplexity_increase is None else perplexity_share(self.max_perplexity_increase)
            ),
            low_meanwhile=self.low_meanwhile or None,
            upgrade=self.upgrade or None,
            reproducible=self.reproducible or None,
            **{name: getattr(self, name) for name in _AS_GIVEN},
            **settings_of(self.settings or ()),
        )
        _refuse_idle_copies(config)
        return config

    @property
    def _preset(self) -> str:
        """Return the given preset, or the one that an option implies."""
        if self.preset != "exact":
            return self.preset
        if self.max_perplexity_increase is not None:
            return "balanced"
        if self.low_precision not in (None, "none"):
            return "hobbit"
        return "smoe" if self.alpha else "exact"


MOST_INCREASE = 0.5
"""The largest accepted increase of perplexity; a larger one means that the per cent sign is missing."""
_AS_GIVEN = (
    "threads",
    "dtype",
    "precision",
    "activations",
    "device",
    "eviction",
    "pools",
    "prefetch",
    "kernels",
    "balance",
    "cluster",
    "profile",
    "alpha",
    "low_precision",
    "low_threshold",
    "skip_threshold",
)
"""Options that are settings of the same name and type."""


def in_container(config: EngineConfig) -> EngineConfig:
    """Return the configuration of a process that has a container for itself, on a CPU: the container's limit is the
    memory budget, if there is a limit and no budget was given."""
    from smoe.load.planned_device import planned_device
    from smoe.machine.available_memory import container_bytes
    from smoe.machine.device import CPU

    is_given = config.memory_bytes is not None or config.resident_share is not None
    if is_given or config.device == EMULATED or planned_device(config) != CPU:
        return config
    limit = container_bytes()
    return config if limit is None else replace(config, memory_bytes=limit, count="process")


def _refuse_idle_copies(config: EngineConfig) -> None:
    """Raise `ConfigError` for low copies that would never be used."""
    by_thresholds = config.precision_shares is None and not config.prices_answers
    if config.has_low and by_thresholds and config.low_threshold >= config.skip_threshold:
        raise ConfigError(
            f"`low_precision` {config.low_precision} would have no effect: no expert comes as a low copy where "
            f"`low_threshold` is {config.low_threshold:g} and `skip_threshold` {config.skip_threshold:g}; give a lower "
            "`low_threshold` such as 0.6, a higher `skip_threshold`, or `precision_shares` such as 67,30,3",
            setting="low_threshold",
            given=config.low_threshold,
            allowed=f"below {config.skip_threshold:g} with `low_precision`",
        )


def substituting(options: EngineOptions, sequences: int = 1) -> EngineConfig:
    """Return the configuration for any threshold: the smoe preset, if none is given.

    Raises `ConfigError` for a given threshold, because the command chooses its own.
    """
    if options.alpha is not None:
        message = "this command sets alpha; leave out --alpha"
        raise ConfigError(message, setting="alpha", given=options.alpha, allowed="no value: the command sets it")
    if options.preset == "exact" and options.low_precision is None:
        options = replace(options, preset="smoe")
    config = replace(options.config(sequences), alpha_as_priced=False)
    return config if config.alpha > 0 else replace(config, alpha=DEFAULT_ALPHA)


def perplexity_share(given: str) -> float:
    """Return a written increase of perplexity, such as 1%, as a share."""
    allowed = parse_share(given, "max_perplexity_increase")
    if allowed > MOST_INCREASE:
        raise ConfigError(
            f"--max-perplexity-increase {given} means {allowed:.0%}; give at most {MOST_INCREASE:.0%}, such as 1% or "
            "0.01",
            setting="max_perplexity_increase",
            given=given,
            allowed=f"a share above 0 and at most {MOST_INCREASE:.0%}",
        )
    return allowed


def check_text(text: str, source: str) -> None:
    """Raise `ConfigError` for bytes that are not UTF-8, which an operating system may pass."""
    try:
        text.encode("utf8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{source} has bytes that are not UTF-8, first after {text[: error.start][-20:]!r}; write it as UTF-8",
            setting=source.removeprefix("--").replace("-", "_"),
            given=ascii(text),
            allowed="text in UTF-8",
        ) from error
