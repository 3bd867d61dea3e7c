"""The options of `smoe tune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from smoe.cli.options import EngineOptions
from smoe.errors import ConfigError
from smoe.plug_ins import PLACE
from smoe.policy.registry import CORRECTED_GATES, FITTED, PREDICTORS

_LOOKED_AT: dict[str, tuple[str, ...]] = {
    "forget": ("prefetch", "eviction"),
    "prices": ("text", "tokens"),
    "cache": ("held_out", "tokens"),
    "predictor": ("text", "trace", "held_out", "tokens"),
    "shares": ("text", "trace", "tokens"),
    "max_perplexity_increase": ("text", "tokens", "out"),
    "prefetch": ("text", "tokens", "eviction"),
    "eviction": ("text", "tokens"),
    "tpot": ("text",),
}
"""{measurement of `smoe tune`, named by its option: the other options that this measurement uses}."""
_DEFAULT = "tpot"


@dataclass(frozen=True)
class TuneOptions:
    """The options of `smoe tune`; a command makes one measurement."""

    tpot: Annotated[
        str | None, typer.Option(help="Find the smallest alpha that meets this time per token, such as 80ms.")
    ] = None
    prices: Annotated[
        bool,
        typer.Option(
            "--prices",
            help="Measure the quality costs of a substitute, of a low-precision copy and of dropping an expert, for "
            "each layer. smoe generate uses these costs with --max-perplexity-increase and --tpot.",
        ),
    ] = False
    shares: Annotated[
        str | None,
        typer.Option(
            help="Profile how important the chosen experts are, for --precision-shares. The value, such as 67,30,3, "
            "gives the per cent of them that are computed in full precision, in low precision and not at all; "
            "the matching thresholds are printed."
        ),
    ] = None
    cache: Annotated[
        list[Path] | None,
        typer.Option(
            help="Trace written by smoe record, to which the weights of --eviction multidimensional are fitted. "
            "Together with --eviction learned, that policy is trained on the trace instead. Repeatable."
        ),
    ] = None
    predictor: Annotated[
        str | None,
        typer.Option(
            help=f"Fit or train this predictor for --prefetch: {CORRECTED_GATES} (on a text), or {', '.join(FITTED)} "
            "or a plug-in's MODULE:CLASS (these on a text or on traces)."
        ),
    ] = None
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --cache or --predictor: trace written by smoe record on which the result is tested. Repeatable."
        ),
    ] = None
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --predictor or --shares: trace written by smoe record that is used instead of --text. "
            "Repeatable with --predictor."
        ),
    ] = None
    text: Annotated[
        Path | None, typer.Option(help="File with the text to measure on: .txt or .jsonl. Default: stories.")
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of tokens of the text, or of each trace, that are used. \\[default: 2000 with "
            "--max-perplexity-increase, 4000 with --shares, 300 with --cache, 400 with --prefetch or --eviction "
            "auto, 8000 with --predictor on a text, else all]",
        ),
    ] = None
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="Delete the stored results of this model's tournaments (--prefetch auto, --eviction auto); if one "
            "of these "
            "options is given, only its results.",
        ),
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --max-perplexity-increase: store results in this folder, and continue from those in it."
        ),
    ] = None

    def measurement(self, engine: EngineOptions) -> str:
        """Return the requested measurement: `forget`, `prices`, `cache`, `predictor`, `shares`,
        `max_perplexity_increase`, `prefetch` or `eviction` (both if auto), or `tpot`, with or without a time.

        Raises `ConfigError` for two measurements, or for an option that the measurement does not use.
        """
        given: dict[str, Any] = {name: value for name, value in vars(self).items() if value not in (None, False, [])}
        if engine.max_perplexity_increase is not None:
            given["max_perplexity_increase"] = engine.max_perplexity_increase
        given |= {name: "auto" for name in ("prefetch", "eviction") if getattr(engine, name) == "auto"}
        asked = [name for name in _LOOKED_AT if name in given]
        if len(asked) > 1 and not {*asked[1:]} <= {"prefetch", "eviction"} & {*_LOOKED_AT[asked[0]]}:
            one, other = (_option(name) for name in asked[:2])
            raise ConfigError(
                f"{one} and {other} are two different measurements, and a command makes one measurement; leave out "
                f"{one} or {other}",
                setting=asked[1],
                given=str(given[asked[1]]),
                allowed=f"only without `{asked[0]}`",
            )
        if self.predictor is not None:
            _check_predictor(self.predictor)
        found = asked[0] if asked else _DEFAULT
        for name in given:
            if name != found and name not in _LOOKED_AT[found]:
                users = [f"`{measurement}`" for measurement, used in _LOOKED_AT.items() if name in used]
                raise ConfigError.idle(name, str(given[name]), " or ".join(users))
        return found


def _check_predictor(name: str) -> None:
    """Raise `ConfigError` for a name that is no predictor that can be fitted."""
    is_known = name in PREDICTORS.built_in or ":" in name
    if not (is_known and PREDICTORS.find(name).learned):
        raise ConfigError.no_choice("predictor", name, (CORRECTED_GATES, *FITTED, PLACE))


def _option(setting: str) -> str:
    return "--" + setting.replace("_", "-")
